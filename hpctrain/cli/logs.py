"""Print the output of the ranks (`hpctrain logs`), until a run ends or the user detaches."""

from __future__ import annotations

import json
import os
import sys
import threading
from itertools import chain
from typing import Any

import click

from hpctrain.cli.common import (
    INTERRUPTED,
    describe_end,
    echo_log,
    exit_for,
    program_name,
    run_argument,
    run_reference,
    short_path,
)
from hpctrain.errors import UserError
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.run_log_reader import EventLine, LogFilter, LogMark, LogPosition, LogText, follow_run
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.remote.protocol import RECORD_START, STREAM_VARIABLE
from hpctrain.text import format_ranks

#: All ranks print nearly the same output; the other logs can be read later.
_RANK_0 = LogFilter(ranks=(0,))

#: For the ranks of a batch script.
_ADVICE = (
    " They may share the output of the script. To separate them, use srun --output=rank-%t.log or --label."
)


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
def command(run: Run, follow: bool, ranks: tuple[int, ...], attempt: int | None, errors: bool) -> None:
    """Print the logs of the ranks of RUN in chronological order, each line prefixed with its rank.

    Lines of one rank keep their order; lines of different ranks within the same second may not. --errors
    shows the traceback of the rank that failed first (or the end of its log) and one line per error on
    other ranks. Add --rank to show another rank in full.
    """
    log_filter = LogFilter(ranks, attempt, errors)
    if follow:
        stream_run(run, log_filter, whole=False)
    elif errors:
        for task in run.tasks() or [run]:
            _print_errors(task, log_filter)
    elif tasks := run.tasks():
        raise UserError(
            f"Run {run.run_id} is a job array of {len(tasks)} tasks with separate logs. Specify a task, "
            f"such as {run_reference(str(tasks[0].dir.path))}, or use -f to follow all tasks."
        )
    else:
        _print_logs(run, log_filter)


def _print_logs(run: Run, log_filter: LogFilter) -> None:
    from hpctrain.jobs.runs.run_log_reader import RankLogReader

    attempts, has_output, is_batch = run.dir.attempts(), False, run.dir.is_batch
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
                f"Available: {format_ranks(ranks)}.{_ADVICE * is_batch}"
            )
        logs = RankLogReader(run.dir, attempt, log_filter.ranks)
        for text in chain(logs.read_past(), logs.read_rest()):
            echo_log(text, nl=False)
            has_output = True
        paths = run.dir.slurm_log, run.dir.rank_log(attempt, 0)
        errors, output = map(os.path.realpath, paths)
        if is_batch and errors != output:
            click.echo(f"The script writes its errors to {errors} (--error).", err=True)
    if has_output:
        return
    status = run.status()
    subject = "the selected ranks" if log_filter.ranks else "the script" if is_batch else "its ranks"
    if attempt != (status.attempt or 0):
        message = f"{subject} wrote no output in attempt {attempt}."
    elif not status.state.ended:
        message = f"{subject} wrote no output yet. Use `hpctrain logs -f` to wait for output."
    else:
        advice = " Use `hpctrain logs --errors` to show the cause." if status.cause else ""
        message = f"{subject} wrote no output.{advice}"
    if is_batch:
        message += " The script may write the output of its ranks to other files, such as with srun --output."
    click.echo(f"Run {run.run_id} is {status.state}: {message}", err=True)
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
    failed_attempts = {event.attempt for event in events if event.kind == "failure"}
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
    elif status.note:
        echo_log(f"{label}note: {status.note}")


def _show_job_log(status: RunStatus, *, err: bool = False) -> None:
    """Print the end of the batch script's log, which may explain a failure that no rank reported."""
    from hpctrain.jobs.runs.error_report import job_log_tail

    if lines := job_log_tail(status.log):
        echo_log("\n".join([f"last lines of {status.log}:", *(f"  {line}" for line in lines)]), err=err)


def stream_run(run: Run, shown: LogFilter = _RANK_0, *, whole: bool, text_to_stderr: bool = False) -> None:
    """Stream the log to stdout and events to stderr, and exit with the code of the run's result."""
    status, explained = None, False
    handle = run_reference(str(run.dir.path))
    detached = (
        f"\nDetached. The run continues. Follow it again: {program_name()} logs -f {handle}  |  "
        f"cancel it: {program_name()} cancel {handle}"
    )
    show, positions, to_stderr = _print, None, text_to_stderr
    if click.get_current_context().meta.get(STREAM_VARIABLE):
        show, start = _send, json.loads(sys.stdin.readline())
        threading.Thread(target=_exit_with_reader, daemon=True).start()
        whole, to_stderr = start.get("whole", whole), start.get("to_stderr", to_stderr)
        positions = {
            source: LogPosition.from_json(position) for source, position in start["positions"].items()
        }
        follow = ["logs", "-f", str(run.dir.path), *(f"--rank={rank}" for rank in shown.ranks)]
        follow += ["--errors"] * shown.errors + [f"--attempt={shown.attempt}"] * (shown.attempt is not None)
        show("follow", {"args": follow, "whole": whole, "to_stderr": to_stderr, "detached": detached})
    try:
        for item in follow_run(run, shown, whole=whole, positions=positions):
            match item:
                case LogText(text, mark):
                    show("err" if to_stderr else "out", text, mark)
                case EventLine(line, details, mark):
                    show("err", "\n   ".join([f"== {line}", *details]) + "\n", mark)
                    explained |= bool(details)
                case LogMark():
                    show("out", "", item)
                case _:
                    status = item
    except KeyboardInterrupt:
        click.echo(detached, err=True)
        sys.exit(INTERRUPTED)
    assert status is not None, "follow() ends with a status"
    show("err", describe_end(status, with_traceback=not explained) + "\n")
    exit_for(status)


def _print(kind: str, content: Any, mark: LogMark | None = None) -> None:  # noqa: ARG001
    echo_log(content, nl=False, err=kind == "err")


def _send(kind: str, content: Any, mark: LogMark | None = None) -> None:
    click.echo(RECORD_START + json.dumps([kind, content, mark]))


def _exit_with_reader() -> None:
    """Exit when the other machine disconnects: a run that prints nothing would not notice it."""
    sys.stdin.read()
    os._exit(1)
