"""Show the state of one run or of all (`hpctrain status`, `hpctrain list`)."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.common import (
    complete_runs,
    describe_progress,
    describe_state,
    echo_json,
    echo_log,
    echo_table,
    format_step,
    json_option,
    one_line,
    open_run,
    runs_dir_option,
    short_path,
)
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import RunState
from hpctrain.text import NOTHING, format_duration, format_number, format_size, format_time

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus

#: A larger `metrics.jsonl` is only read for `--json`, because reading it takes a second or more.
_MAX_METRICS_BYTES = 50_000_000
_HEADER = ("RUN", "STATE", "JOB", "AGE", "STEP", "LOSS", "")


@click.command("status")
@click.pass_context
@click.argument("run", metavar="[RUN]", required=False, shell_complete=complete_runs)
@runs_dir_option
@json_option
def command(context: click.Context, run: str | None, runs_dir: Path, as_json: bool) -> None:
    """Show the state of RUN, with its progress, newest checkpoint and failure. Without RUN, list all runs.

    For a job array, show the number of tasks in each state. To show one task, use RUN/task-3. If RUN has more
    than 50 MB of metrics, only --json shows the best value.
    """
    if run is None:
        context.invoke(list_command, runs_dir=runs_dir, as_json=as_json)
        return
    from hpctrain.telemetry.report.attempts import describe_arguments
    from hpctrain.telemetry.report.run_results import describe_results, read_results

    opened = open_run(run, runs_dir)
    folder, status = opened.dir, opened.status()
    size = folder.metrics.stat().st_size if folder.metrics.exists() else 0
    with_metrics = as_json or size <= _MAX_METRICS_BYTES
    results = None if status.tasks is not None else read_results(folder, with_metrics=with_metrics)
    if as_json:
        echo_json(asdict(status) | (asdict(results) if results else {}))
        return
    from hpctrain.jobs.runs.error_report import job_log_tail

    stopped = status.state.ended or not folder.is_asked_to_requeue(status.attempt or 0)
    facts = {
        "run": status.run_id,
        "folder": short_path(status.run_dir),
        "state": describe_state(status),
        "job": f"{status.job_id} on {status.backend}" if status.job_id else None,
        "attempt": status.attempt,
        "arguments": one_line("; ".join(describe_arguments(folder.read_events()))) or None,
        "nodes": status.nodes,
        "restarts": _describe_restarts(folder),
        "requeue": None if stopped else "requested; the ranks of this attempt have not stopped yet",
        "step": describe_progress(status),
        "loss": None if status.loss is None else format_number(status.loss),
        "best": None if with_metrics else f"not computed: {format_size(size)} of metrics (use --json)",
        **{name: one_line(text) for name, text in (describe_results(results) if results else {}).items()},
        "checkpoint": _describe_checkpoint(status, folder),
        "not saved": status.not_saved,
        "note": one_line(status.note) if status.note else None,
        "cause": one_line(status.cause) if status.cause else None,
        "log": short_path(status.log) if status.log else None,
    }
    for name, value in facts.items():
        if value is not None:
            click.echo(f"{name:<11} {value}")
    for line in job_log_tail(status.log):
        echo_log(f"            {line}")


def _describe_restarts(run: RunDir) -> str | None:
    """Return the number of restarts since the submission, and the time and cause of the last."""
    num_restarts, newest = 0, None
    for event in run.read_events():
        if event.is_new_submission:
            num_restarts, newest = 0, None
        elif event.kind in ("restart", "shrink", "replace", "requeue"):
            num_restarts, newest = num_restarts + 1, event
    if newest is None:
        return None
    cause = newest.cause or newest.end_kind or newest.kind
    return f"{num_restarts}, the last at {format_time(newest.time)}: {one_line(cause)}"


def _describe_checkpoint(status: RunStatus, run: RunDir) -> str | None:
    from hpctrain.jobs.runs.run_status import checkpoint_pattern, unmatched_pattern
    from hpctrain.records.checkpoint_health import starts_over

    problem = None if status.attempt is None else unmatched_pattern(run)
    if problem and not status.state.ended and not status.attempt:
        problem = f"no file matches {short_path(str(checkpoint_pattern(run)))} (--checkpoints) yet"
    if status.checkpoint:
        return "; ".join(filter(None, [short_path(status.checkpoint), problem]))
    if problem:
        return f"none: {problem}"
    is_batch = run.is_batch
    if is_batch and status.attempt is not None and status.state != "COMPLETED":
        if starts_over(run):
            return "none: a restart starts over, unless the script saves files without --checkpoints"
        return "saved by the script; name its files with --checkpoints"
    if status.attempt and starts_over(run):
        return (
            f"none in {short_path(run.checkpoints)}; restarts start over, unless the script saves elsewhere"
        )
    return None


@click.command("list")
@runs_dir_option
@json_option
def list_command(runs_dir: Path, as_json: bool) -> None:
    """List all runs, newest last, with one line per job array.

    To list the tasks of a job array or the trials of a sweep, use `hpctrain sweep status`.
    """
    from hpctrain.jobs.runs.run import list_runs, query_statuses

    statuses = query_statuses(list_runs(runs_dir, os.environ), skip_unreadable=True)
    if as_json:
        echo_json([asdict(status) for status in statuses])
    elif statuses:
        echo_table([_HEADER, *(_row(status, time.time()) for status in statuses)])
    else:
        click.echo(f"No runs in {runs_dir}.", err=True)


def _row(status: RunStatus, time_now: float) -> tuple[str, ...]:
    from hpctrain.jobs.runs.status_poller import describe_unknown

    note = status.words if status.tasks is not None else ""
    if status.state is RunState.UNKNOWN and status.tasks is None:
        note = describe_unknown(status) if status.job_id is not None else status.words
    return (
        status.run_id,
        str(status.state),
        f"{status.backend} {status.job_id}" if status.job_id else NOTHING,
        NOTHING if status.submitted is None else format_duration(max(0.0, time_now - status.submitted)),
        format_step(status),
        format_number(status.loss),
        note,
    )
