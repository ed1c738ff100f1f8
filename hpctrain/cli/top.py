"""`hpctrain top`: show a live view of one or several runs."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.common import complete_runs, echo_json, json_option, open_run, runs_dir_option
from hpctrain.errors import UserError

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run import Run
    from hpctrain.jobs.runs.run_status import RunStatus
    from hpctrain.telemetry.live.top_view import TopSnapshot

#: Seconds between two queries to the scheduler; files are read more often.
_QUERY_INTERVAL_S = 10.0
_LOG_LINES = 20
#: A table has at most this number of runs, because reading the metrics of thousands would take minutes.
_MAX_RUNS = 200

#: Formats the current state for a terminal of some columns and lines, as lines with their kinds.
_Format = Callable[[Sequence["TopSnapshot"], int, int], list[tuple[str, str]]]


@click.command("top")
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_runs)
@runs_dir_option
@click.option(
    "--filter",
    "words",
    metavar="WORDS",
    help="Show the runs whose ids, states and hyper-parameters contain all WORDS, such as 'failed lr=0.1'.",
)
@click.option(
    "--once",
    is_flag=True,
    help="Print the view once and exit. This is the default if the output is not a terminal.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between updates.",
)
@json_option
def command(
    runs: tuple[str, ...], runs_dir: Path, words: str | None, once: bool, interval: float, as_json: bool
) -> None:
    """Show a live view of RUN: state, step, remaining time, loss, speed, GPUs, events and log.

    For several runs or a sweep, or for all runs if RUN is omitted, show one line per run (at most 200),
    active and newer runs first. All loss curves have the same logarithmic scale.

    The view closes when all of these runs have ended. Ctrl-C closes the view and does not affect the runs.
    """
    from hpctrain.jobs.runs.run import list_runs
    from hpctrain.telemetry.live.overview import format_overview
    from hpctrain.telemetry.live.top_view import format_view

    found = [open_run(run, runs_dir) for run in runs] or list_runs(runs_dir, os.environ)
    found = [part for run in found for part in run.tasks() or [run]]
    is_single = len(runs) == len(found) == 1 and words is None
    looks = _looks(found, (words or "").lower().split())
    form: _Format = (lambda seen, *size: format_view(seen[0], *size)) if is_single else format_overview
    if as_json:
        documents = [one.document() for one in next(looks)]
        echo_json(documents[0] if is_single else documents)
    elif once or not sys.stdout.isatty():
        for _, line in form(next(looks), *_size()):
            click.echo(line)
    else:
        _show(looks, form, interval)


class _LiveRun:
    """A run, with a reader of the records that it appends."""

    def __init__(self, run: Run) -> None:
        from hpctrain.records.log_tail import RecordTail
        from hpctrain.telemetry.live.top_view import TopView

        self._run, self._view = run, TopView()
        self._events, self._metrics = RecordTail(run.dir.events), RecordTail(run.dir.metrics)

    def look(self, status: RunStatus) -> TopSnapshot:
        """Return the current state of the run."""
        from hpctrain.records.log_tail import read_last_lines

        self._view.add_records(self._events.read_in_parts(), self._metrics.read_in_parts())
        log = status.log or self._run.log_path()
        return self._view.snapshot(
            status.run_id,
            str(status.state),
            status.words,
            _last_lines(self._run),
            reports_steps=status.reports_steps,
            log=read_last_lines(Path(log), _LOG_LINES) if log else (),
        )


def _looks(runs: Sequence[Run], words: Sequence[str]) -> Iterator[list[TopSnapshot]]:
    """Yield the current state of the runs repeatedly, active and newer runs first, finally after their end.

    Raises:
        UserError: there is no such run.
    """
    from hpctrain.jobs.runs.run import query_statuses
    from hpctrain.rundir import RunDir

    live = {str(run.dir): _LiveRun(run) for run in reversed(runs)}
    statuses: list[RunStatus] = []
    asked = -_QUERY_INTERVAL_S
    while True:
        # The state is queried before the files are read, so that no record before the end is missed.
        if time.monotonic() - asked >= _QUERY_INTERVAL_S:
            statuses = [
                one for one in query_statuses(runs[::-1], skip_unreadable=True) if _matches(one, words)
            ]
            statuses = sorted(statuses, key=lambda one: one.state.ended)[:_MAX_RUNS]
            asked = time.monotonic()
            if not statuses:
                raise UserError(
                    "No run matches (--filter, --runs-dir). Use `hpctrain list` to list all runs."
                )
        yield [live[str(RunDir(Path(one.run_dir)))].look(one) for one in statuses]
        if all(one.state.ended for one in statuses):
            return


def _matches(status: RunStatus, words: Sequence[str]) -> bool:
    """True if the id, the state and the hyper-parameters of a run contain all words."""
    if not words:
        return True
    from hpctrain.rundir import RunDir
    from hpctrain.telemetry.report.run_results import read_results

    hparams = read_results(RunDir(Path(status.run_dir)), with_metrics=False).hparams
    texts = [status.run_id, status.state, *(f"{name}={value}" for name, value in hparams.items())]
    return all(word in " ".join(map(str, texts)).lower() for word in words)


def _last_lines(run: Run) -> Iterator[Mapping[str, Any]]:
    """Yield the last measurement of each node."""
    from hpctrain.records.log_tail import read_last_records

    for path in run.dir.all_telemetry():
        if (line := next(read_last_records(path), None)) is not None:
            yield line


def _show(looks: Iterator[list[TopSnapshot]], form: _Format, interval: float) -> None:
    """Draw on the terminal until all runs have ended."""
    from rich.console import Console
    from rich.live import Live as Screen
    from rich.text import Text

    styles = {"title": "bold", "soft": "dim", "bad": "red"}
    console = Console(highlight=False)
    with Screen(console=console, auto_refresh=False) as screen:
        try:
            for look in looks:
                text = Text(no_wrap=True)
                for kind, line in form(look, console.width, console.height - 1):
                    text.append(line + "\n", style=styles.get(kind, ""))
                screen.update(text, refresh=True)
                if any(one.state in ("RUNNING", "PENDING", "UNKNOWN") for one in look):
                    time.sleep(interval)
        except KeyboardInterrupt:
            pass


def _size() -> tuple[int, int]:
    """Return columns and lines for the one-time output; fixed values if stdout is not a terminal."""
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        return size.columns, size.lines
    return 120, 40
