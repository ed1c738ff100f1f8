"""Print the output of the ranks (`hpctrain logs`)."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import click

from hpctrain.cli.common import echo_log, open_run, run_argument, run_reference, short_path
from hpctrain.errors import UserError
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.run_log_reader import LogFilter
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.text import format_ranks


@click.command("logs")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Follow the logs, across attempts, until the run ends.")
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="R",
    help="Rank to show. Repeatable.  [default: all]",
)
@click.option(
    "--attempt", type=click.IntRange(min=0), metavar="N", help="Attempt to show.  [default: the newest]"
)
@click.option("--errors", is_flag=True, help="Show only errors, with the cause of each failed attempt first.")
def command(
    run: str, runs_dir: Path, follow: bool, ranks: tuple[int, ...], attempt: int | None, errors: bool
) -> None:
    """Print the logs of the ranks of RUN in chronological order, each line prefixed with its rank.

    Lines of one rank keep their order; lines of different ranks within the same second may not. --errors
    shows the traceback of the rank that failed first (or the end of its log) and one line per error on
    other ranks. Add --rank to show another rank in full.
    """
    opened = open_run(run, runs_dir)
    log_filter = LogFilter(ranks, attempt, errors)
    if follow:
        from hpctrain.cli.live_output import stream_run

        stream_run(opened, log_filter, whole=False)
    elif errors:
        for task in opened.tasks() or [opened]:
            _print_errors(task, log_filter)
    elif tasks := opened.tasks():
        raise UserError(
            f"Run {opened.run_id} is a job array of {len(tasks)} tasks with separate logs. Specify a task, "
            f"such as {run_reference(str(tasks[0].dir.path))}, or use -f to follow all tasks."
        )
    else:
        _print_logs(opened, log_filter)


def _print_logs(run: Run, log_filter: LogFilter) -> None:
    from hpctrain.jobs.runs.run_log_reader import RankLogReader

    attempts, has_output = run.dir.attempts(), False
    attempt = log_filter.attempt if log_filter.attempt is not None else attempts[-1] if attempts else 0
    if attempts:
        if attempt not in attempts:
            raise UserError(
                f"Run {run.run_id} has no attempt {attempt} (--attempt). Available: "
                f"{format_ranks(attempts, 'attempt')}."
            )
        ranks = run.dir.ranks(attempt)
        if ranks and (missing := [rank for rank in log_filter.ranks if rank not in ranks]):
            raise UserError(
                f"No log of rank {missing[0]} (--rank) in {short_path(run.dir.attempt_logs(attempt))}. "
                f"Available: {format_ranks(ranks)}."
            )
        logs = RankLogReader(run.dir, attempt, log_filter.ranks)
        for text in chain(logs.read_past(), logs.read_rest()):
            echo_log(text, nl=False)
            has_output = True
    if has_output:
        return
    status = run.status()
    subject = "the selected ranks" if log_filter.ranks else "its ranks"
    if attempt != (status.attempt or 0):
        remark = f"{subject} wrote no output in attempt {attempt}."
    elif not status.state.ended:
        remark = f"{subject} have not written any output yet. Use `hpctrain logs -f` to wait for output."
    else:
        advice = " Use `hpctrain logs --errors` to show the cause." if status.cause else ""
        remark = f"{subject} wrote no output.{advice}"
    click.echo(f"Run {run.run_id} is {status.state}: {remark}", err=True)
    if attempt == (status.attempt or 0):
        _show_job_log(status, err=True)


def _print_errors(run: Run, log_filter: LogFilter) -> None:
    from hpctrain.jobs.runs.error_report import (
        crashed_log_tail,
        failures_of_attempt,
        failures_since_submission,
        report_failure,
    )

    events, attempt = list(run.dir.read_events()), log_filter.attempt
    failures = failures_since_submission(events) if attempt is None else failures_of_attempt(events, attempt)
    label = f"{run.run_id}: " if run.dir.array else ""
    for failure in failures:
        for index, line in enumerate(report_failure(run.dir, failure, log_filter.ranks)):
            echo_log(f"{'' if index else label}{line}")
    status = None if failures else run.status()
    if status is None or (label and status.cause is None):
        return
    failed_attempts = {event.get("attempt", 0) for event in events if event.get("kind") == "failure"}
    searched = "" if attempt is None else f" in attempt {attempt}"
    if attempt is None and failed_attempts:
        numbers = format_ranks(sorted(failed_attempts), "attempt")
        searched = f" since the last submission. For the failures of {numbers}, use --attempt"
    click.echo(f"Run {run.run_id} has no recorded failures{searched}.", err=True)
    if status.cause and attempt in (None, status.attempt):
        echo_log(f"{label}cause: {status.cause}")
        _show_job_log(status)
        if lines := crashed_log_tail(run.dir, status.attempt or 0):
            echo_log("\n".join(lines))


def _show_job_log(status: RunStatus, *, err: bool = False) -> None:
    """Print the end of the batch script's log, which may explain a failure that no rank reported."""
    from hpctrain.jobs.runs.error_report import job_log_tail

    if lines := job_log_tail(status.log):
        echo_log("\n".join([f"last lines of {status.log}:", *(f"  {line}" for line in lines)]), err=err)
