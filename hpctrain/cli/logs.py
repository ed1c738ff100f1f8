"""Print the output of the ranks (`hpctrain logs`)."""

from __future__ import annotations

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
    found = open_run(run, runs_dir)
    shown = LogFilter(ranks, attempt, errors)
    if follow:
        from hpctrain.cli.live_output import stream_run

        stream_run(found, shown, whole=False)
    elif errors:
        for part in found.tasks() or [found]:
            _print_errors(part, shown)
    elif tasks := found.tasks():
        raise UserError(
            f"Run {found.run_id} is a job array of {len(tasks)} tasks with separate logs. Specify a task, "
            f"such as {run_reference(str(tasks[0].dir.path))}, or use -f to follow all tasks."
        )
    else:
        _print_logs(found, shown)


def _print_logs(run: Run, shown: LogFilter) -> None:
    from hpctrain.jobs.runs.rank_logs import RankLogReader

    attempts = run.dir.attempts()
    if not attempts:
        _print_no_logs(run, shown)
        return
    attempt = attempts[-1] if shown.attempt is None else shown.attempt
    if attempt not in attempts:
        raise UserError(
            f"Run {run.run_id} has no attempt {attempt} (--attempt). Available: "
            f"{format_ranks(attempts, 'attempt')}."
        )
    ranks = run.dir.ranks(attempt)
    if ranks and (missing := [rank for rank in shown.ranks if rank not in ranks]):
        raise UserError(
            f"No log of rank {missing[0]} (--rank) in {short_path(run.dir.attempt_logs(attempt))}. "
            f"Available: {format_ranks(ranks)}."
        )
    logs = RankLogReader(run.dir, attempt, shown.ranks)
    anything = False
    for reading in (logs.read_past, logs.read_rest):
        for text in reading():
            echo_log(text, nl=False)
            anything = True
    if not anything:
        _print_no_logs(run, shown, attempt)


def _print_no_logs(run: Run, shown: LogFilter, attempt: int = 0) -> None:
    status = run.status()
    subject = "the selected ranks" if shown.ranks else "its ranks"
    if attempt != (status.attempt or 0):
        sentence = f"{subject} wrote no output in attempt {attempt}."
    elif not status.state.ended:
        sentence = f"{subject} have not written any output yet. Use `hpctrain logs -f` to wait for output."
    else:
        advice = " Use `hpctrain logs --errors` to show the cause." if status.cause else ""
        sentence = f"{subject} wrote no output.{advice}"
    click.echo(f"Run {run.run_id} is {status.state}: {sentence}", err=True)
    if attempt == (status.attempt or 0):
        _show_job_log(status, err=True)


def _print_errors(run: Run, shown: LogFilter) -> None:
    from hpctrain.jobs.runs.error_report import (
        crashed_log_tail,
        failures_of_attempt,
        failures_since_submission,
        report_failure,
    )

    if shown.attempt is None:
        failures = failures_since_submission(run.dir.read_events())
    else:
        failures = failures_of_attempt(run.dir.read_events(), shown.attempt)
    label = f"{run.run_id}: " if run.dir.array else ""
    if not failures:
        status = run.status()
        if not (label and status.cause is None):
            click.echo(f"Run {run.run_id} has no recorded failures{_searched(run, shown)}", err=True)
        if status.cause and shown.attempt in (None, status.attempt):
            echo_log(f"{label}cause: {status.cause}")
            _show_job_log(status)
            if lines := crashed_log_tail(run.dir, status.attempt or 0):
                echo_log("\n".join(lines))
    for failure in failures:
        for number, line in enumerate(report_failure(run.dir, failure, shown.ranks)):
            echo_log(f"{'' if number else label}{line}")


def _searched(run: Run, shown: LogFilter) -> str:
    """Return the end of a sentence on missing failures: the attempts that were searched."""
    if shown.attempt is not None:
        return f" in attempt {shown.attempt}."
    failed = {event.get("attempt", 0) for event in run.dir.read_events() if event.get("kind") == "failure"}
    if not failed:
        return "."
    attempts = format_ranks(sorted(failed), "attempt")
    return f" since the last submission. For the failures of {attempts}, use --attempt."


def _show_job_log(status: RunStatus, *, err: bool = False) -> None:
    """Print the end of the batch script's log, which may explain a failure that no rank reported."""
    from hpctrain.jobs.runs.error_report import job_log_tail

    if lines := job_log_tail(status.log):
        echo_log("\n".join([f"last lines of {status.log}:", *(f"  {line}" for line in lines)]), err=err)
