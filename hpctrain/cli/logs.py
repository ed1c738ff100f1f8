"""`hpctrain logs`: what the ranks printed."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.common import handle_of, open_run, run_argument, short_path
from hpctrain.errors import UserError
from hpctrain.jobs.reading import Shown
from hpctrain.jobs.runs import Run
from hpctrain.jobs.status import RunStatus


@click.command("logs")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended, across its attempts.")
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="R",
    help="Whose log; may be repeated. All, where it is left out.",
)
@click.option(
    "--attempt", type=click.IntRange(min=0), metavar="N", help="Which start of the ranks; else the newest."
)
@click.option("--errors", is_flag=True, help="Only what went wrong: of each failed attempt, the cause first.")
def command(
    run: str, runs_dir: Path, follow: bool, ranks: tuple[int, ...], attempt: int | None, errors: bool
) -> None:
    """Print the logs of the ranks of RUN, in the order of time, each line behind its rank.

    The lines of one rank are always in their order; among ranks, those of the same second may not be. With
    --errors, the rank that failed first is shown with its traceback, or the end of its log where it died
    without one, and the others in a line each; --rank shows those in full.
    """
    found = open_run(run, runs_dir)
    shown = Shown(ranks, attempt, errors)
    if follow:
        from hpctrain.cli.stream import stream

        stream(found, shown, whole=False)
    elif errors:
        for part in found.tasks() or [found]:
            _print_errors(part, shown)
    elif tasks := found.tasks():
        raise UserError(
            f"Run {found.run_id} is a job array of {len(tasks)} tasks, each with logs of its own. Name one, "
            f"such as {handle_of(str(tasks[0].dir.path))}; with -f, those of all are shown."
        )
    else:
        _print_logs(found, shown)


def _print_logs(run: Run, shown: Shown) -> None:
    from hpctrain.jobs.rank_logs import RankLogs

    attempts = run.dir.attempts()
    if not attempts:
        _say_that_nothing_is_there(run, shown)
        return
    attempt = attempts[-1] if shown.attempt is None else shown.attempt
    if attempt not in attempts:
        raise UserError(
            f"There is no attempt {attempt} of run {run.run_id} (--attempt): it has {_range(attempts)}."
        )
    there = run.dir.ranks(attempt)
    if there and (missing := [rank for rank in shown.ranks if rank not in there]):
        raise UserError(
            f"There is no log of rank {missing[0]} in {short_path(run.dir.attempt_logs(attempt))}: it has "
            f"ranks {_range(there)} (--rank)."
        )
    logs = RankLogs(run.dir, attempt, shown.ranks)
    anything = False
    for reading in (logs.read_past, logs.read_rest):
        for text in reading():
            click.echo(text, nl=False)
            anything = True
    if not anything:
        _say_that_nothing_is_there(run, shown, attempt)


def _say_that_nothing_is_there(run: Run, shown: Shown, attempt: int = 0) -> None:
    status = run.status()
    whose = "the ranks that were asked for" if shown.ranks else "its ranks"
    if attempt != (status.attempt or 0):
        words = f"{whose} wrote nothing in attempt {attempt}."
    elif not status.state.ended:
        words = f"{whose} have written nothing yet. `hpctrain logs -f` waits for them."
    else:
        advice = " `hpctrain logs --errors` shows what went wrong." if status.cause else ""
        words = f"{whose} have written nothing.{advice}"
    click.echo(f"Run {run.run_id} is {status.state}: {words}", err=True)
    if attempt == (status.attempt or 0):
        _show_job_log(status, err=True)


def _print_errors(run: Run, shown: Shown) -> None:
    from hpctrain.jobs.error_report import failures_since_submission, report

    failures = failures_since_submission(run.dir.read_events())
    wanted = [failure for failure in failures if shown.attempt in (None, failure.get("attempt"))]
    label = f"{run.run_id}: " if run.dir.array else ""
    if not wanted:
        status = run.status()
        if not (label and status.cause is None):
            click.echo(f"No failure of run {run.run_id} is on record.", err=True)
        if status.cause and shown.attempt in (None, status.attempt):
            click.echo(f"{label}cause: {status.cause}")
            _show_job_log(status)
    for failure in wanted:
        for number, line in enumerate(report(run.dir, failure, shown.ranks)):
            click.echo(f"{'' if number else label}{line}")


def _show_job_log(status: RunStatus, *, err: bool = False) -> None:
    """Where no rank tells why the run failed, the batch script may."""
    from hpctrain.jobs.error_report import end_of_job_log

    if lines := end_of_job_log(status.log):
        click.echo("\n".join([f"the end of log: {status.log}", *(f"  {line}" for line in lines)]), err=err)


def _range(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
