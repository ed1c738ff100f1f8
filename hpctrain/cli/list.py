"""List all runs, one per line (`hpctrain list`)."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.common import complete_runs, echo_json, echo_table, json_option, open_run, runs_dir_option
from hpctrain.text import NOTHING, format_count, format_duration, format_number

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus

_HEADER = ("RUN", "STATE", "JOB", "AGE", "STEP", "LOSS", "")


@click.command("list")
@click.argument("array", metavar="[ARRAY]", required=False, shell_complete=complete_runs)
@runs_dir_option
@click.option(
    "--sort",
    metavar="NAME",
    help="Sort by a hyper-parameter or a metric, and show the hyper-parameters that differ between runs.",
)
@click.option("--reverse", is_flag=True, help="Reverse the order of --sort.")
@json_option
def command(runs_dir: Path, as_json: bool, array: str | None, sort: str | None, reverse: bool) -> None:
    """List all runs, newest last, with one line per job array.

    With ARRAY, list the tasks of this job array or sweep, with the hyper-parameters that differ.
    """
    from hpctrain.jobs.runs.run import list_runs, query_statuses

    if reverse and sort is None:
        raise click.UsageError("--reverse requires --sort. Add --sort NAME.")
    runs = list_runs(runs_dir, os.environ)
    if array is not None:
        opened = open_run(array, runs_dir)
        runs = opened.tasks() or [opened]
    elif sort is not None:
        runs = [each for run in runs for each in run.tasks() or [run]]
    found = query_statuses(runs, skip_unreadable=True)
    if array is not None or sort is not None:
        _print_results(found, sort, reverse=reverse, as_json=as_json)
        return
    if as_json:
        echo_json([asdict(status) for status in found])
        return
    if not found:
        click.echo(f"No runs in {runs_dir}.", err=True)
        return
    echo_table([_HEADER, *(_row(status, time.time()) for status in found)])


def _print_results(found: list[RunStatus], sort: str | None, *, reverse: bool, as_json: bool) -> None:
    from hpctrain.cli.results_table import as_document, echo_rows, read_rows, sort_rows

    rows = read_rows(found)
    if sort is not None:
        rows = sort_rows(rows, sort, reverse=reverse)
    if as_json:
        echo_json([as_document(row) for row in rows])
    else:
        echo_rows(rows, [sort] if sort not in (None, "step", "state") else [])


def _row(status: RunStatus, now: float) -> tuple[str, ...]:
    from hpctrain.jobs.runs.status_poller import describe_unknown
    from hpctrain.slurm.states import RunState

    about = status.words if status.tasks is not None else ""
    if status.state is RunState.UNKNOWN and status.tasks is None:
        about = describe_unknown(status) if status.job_id is not None else status.words
    return (
        status.run_id,
        str(status.state),
        f"{status.backend} {status.job_id}" if status.job_id else NOTHING,
        NOTHING if status.submitted is None else format_duration(max(0.0, now - status.submitted)),
        "not reported" if status.reports_steps is False else format_count(status.step),
        format_number(status.loss),
        about,
    )
