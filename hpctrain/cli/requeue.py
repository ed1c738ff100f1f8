"""Save a run and continue it in a new attempt (`hpctrain requeue`)."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.common import echo_json, json_option, open_run, run_argument


@click.command("requeue")
@run_argument
@json_option
def command(run: str, runs_dir: Path, as_json: bool) -> None:
    """Save the state of the active RUN and continue it in a new attempt, as after a preemption.

    If RUN has already been requeued, end Slurm's two-minute delay for requeued jobs.
    """
    from hpctrain.slurm.states import RunState

    opened = open_run(run, runs_dir)
    before = opened.requeue()
    if as_json:
        echo_json({"run_id": opened.run_id, "job_id": before.job_id, "requeued": True})
    elif before.state is RunState.PENDING:
        click.echo(
            f"Ended Slurm's requeue delay for run {opened.run_id}. The run starts when nodes are available."
        )
    else:
        click.echo(
            f"Requeueing run {opened.run_id}. The script saves a checkpoint first, if it can. The run then "
            "continues in a new attempt."
        )
