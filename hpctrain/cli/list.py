"""List all runs, one per line (`hpctrain list`)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.common import echo_json, echo_table, json_option, runs_dir_option
from hpctrain.text import NOTHING, format_count, format_duration, format_number

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus

_HEADER = ("RUN", "STATE", "JOB", "AGE", "STEP", "LOSS", "")


@click.command("list")
@runs_dir_option
@json_option
def command(runs_dir: Path, as_json: bool) -> None:
    """List all runs, newest last, with one line per job array.

    To list the tasks of a job array or the trials of a sweep, use `hpctrain sweep status`.
    """
    from hpctrain.jobs.runs.run import list_runs, query_statuses

    statuses = query_statuses(list_runs(runs_dir, os.environ), skip_unreadable=True)
    if as_json:
        echo_json([asdict(status) for status in statuses])
    elif statuses:
        print_runs(statuses)
    else:
        click.echo(f"No runs in {runs_dir}.", err=True)


def print_runs(statuses: Sequence[RunStatus], clusters: Sequence[str] = ()) -> None:
    """Print one line per run, preceded by its cluster, if given."""
    rows = [_HEADER, *(_row(status, time.time()) for status in statuses)]
    if clusters:
        rows = [(name, *row) for name, row in zip(["CLUSTER", *clusters], rows, strict=True)]
    echo_table(rows)


def _row(status: RunStatus, time_now: float) -> tuple[str, ...]:
    from hpctrain.jobs.runs.run_status import describe_unknown
    from hpctrain.slurm.states import RunState

    note = status.words if status.tasks is not None else ""
    if status.state is RunState.UNKNOWN and status.tasks is None:
        note = describe_unknown(status) if status.job_id is not None else status.words
    return (
        status.run_id,
        str(status.state),
        f"{status.backend} {status.job_id}" if status.job_id else NOTHING,
        NOTHING if status.submitted is None else format_duration(max(0.0, time_now - status.submitted)),
        "not reported" if status.reports_steps is False else format_count(status.step),
        format_number(status.loss),
        note,
    )
