"""`hpctrain cancel`: end a run permanently."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.common import echo_json, json_option, open_run, run_argument


@click.command("cancel")
@run_argument
@json_option
def command(run: str, runs_dir: Path, as_json: bool) -> None:
    """Cancel RUN after saving its state. Does nothing if RUN has already finished."""
    from hpctrain.slurm.states import RunState

    found = open_run(run, runs_dir)
    before = found.cancel()
    if as_json:
        echo_json({"run_id": found.run_id, "job_id": before.job_id, "cancelled": not before.state.ended})
    elif before.state.ended:
        click.echo(f"Run {found.run_id} has already finished ({before.state}).")
    elif before.state is RunState.PENDING:
        click.echo(f"Cancelled run {found.run_id} before it started.")
    else:
        limit = "Slurm's KillWait time" if before.backend == "slurm" else "a minute"
        click.echo(
            f"Cancelling run {found.run_id}. The script saves a checkpoint first, if it can. The run ends "
            f"within {limit}."
        )
