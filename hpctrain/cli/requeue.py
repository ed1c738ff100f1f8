"""`hpctrain requeue`: save, and go on in a new attempt."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.common import echo_json, json_option, open_run, run_argument


@click.command("requeue")
@run_argument
@json_option
def command(run: str, runs_dir: Path, as_json: bool) -> None:
    """Ask the running RUN to save its state and go on in a new attempt, as a preemption does."""
    found = open_run(run, runs_dir)
    before = found.requeue()
    if as_json:
        echo_json({"run_id": found.run_id, "job_id": before.job_id, "requeued": True})
    else:
        click.echo(f"Run {found.run_id} is told to save and go on in a new attempt.")
