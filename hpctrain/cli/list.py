"""`hpctrain list`: all runs, a line each."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from hpctrain.cli.common import echo_json, json_option, runs_dir_option


@click.command("list")
@runs_dir_option
@json_option
def command(runs_dir: Path, as_json: bool) -> None:
    """List the runs, the newest last. A job array is one line; Slurm is asked once for all."""
    from hpctrain.jobs.doubt import unknown_for
    from hpctrain.jobs.runs import list_runs, statuses
    from hpctrain.jobs.states import RunState

    found = statuses(list_runs(runs_dir, os.environ))
    if as_json:
        echo_json([asdict(status) for status in found])
        return
    if not found:
        click.echo(f"No runs in {runs_dir}.", err=True)
        return
    width = max(len(status.run_id) for status in found)
    for status in found:
        job = f"{status.backend} {status.job_id}" if status.job_id else ""
        if status.tasks is not None:
            about = status.words
        elif status.state is RunState.UNKNOWN and status.job_id is not None:
            about = unknown_for(status)
        else:
            about = f"step {status.step}" if status.step is not None else ""
        click.echo(f"{status.run_id:<{width}}  {status.state:<9}  {job:<16}  {about}".rstrip())
