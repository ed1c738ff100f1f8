"""`hpctrain cancel`: end a run for good."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.common import echo_json, json_option, open_run, run_argument


@click.command("cancel")
@run_argument
@json_option
def command(run: str, runs_dir: Path, as_json: bool) -> None:
    """Ask RUN to save its state and end. An ended run stays as it is."""
    from hpctrain.jobs.states import RunState

    found = open_run(run, runs_dir)
    before = found.cancel()
    if as_json:
        echo_json({"run_id": found.run_id, "job_id": before.job_id, "cancelled": not before.state.ended})
    elif before.state.ended:
        click.echo(f"Run {found.run_id} had ended already: {before.state}.")
    elif before.state is RunState.PENDING:
        click.echo(f"Run {found.run_id} is cancelled: it was waiting to start.")
    else:
        click.echo(
            f"Run {found.run_id} is told to save and end; it has a minute, or what Slurm's KillWait gives."
        )
