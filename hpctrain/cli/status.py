"""`hpctrain status`: where one run stands."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from hpctrain.cli.common import (
    describe_state,
    echo_json,
    json_option,
    one_line,
    open_run,
    run_argument,
    short_path,
)


@click.command("status")
@run_argument
@json_option
def command(run: str, runs_dir: Path, as_json: bool) -> None:
    """Show where RUN stands: state, job, progress, newest checkpoint, cause of failure.

    Of a job array, it says how many tasks are in which state; RUN/task-3 is one of them. A job that only
    waits for the delay which Slurm puts on a requeue is let go at once.
    """
    found = open_run(run, runs_dir)
    status = found.status()
    lifted = status.held and found.lift_hold()
    if as_json:
        echo_json({**asdict(status), "hold_lifted": lifted})
        return
    from hpctrain.jobs.error_report import end_of_job_log

    facts = {
        "run": status.run_id,
        "folder": short_path(status.run_dir),
        "state": describe_state(status),
        "job": f"{status.job_id} on {status.backend}" if status.job_id else None,
        "attempt": status.attempt,
        "nodes": status.nodes,
        "step": status.step,
        "loss": status.loss,
        "checkpoint": short_path(status.checkpoint) if status.checkpoint else None,
        "not saved": status.not_saved,
        "cause": one_line(status.cause) if status.cause else None,
        "log": short_path(status.log) if status.log else None,
    }
    for name, value in facts.items():
        if value is not None:
            click.echo(f"{name:<11} {value}")
    for line in end_of_job_log(status.log):
        click.echo(f"            {line}")
    if lifted:
        click.echo("Slurm held the requeued job back for two minutes; the delay is lifted.")
