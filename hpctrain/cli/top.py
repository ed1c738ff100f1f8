"""Show a live view of one or several runs (`hpctrain top`)."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.common import complete_runs, echo_json, json_option, open_run, runs_dir_option
from hpctrain.cli.serve import QUERY_INTERVAL_S, hparams_text
from hpctrain.errors import UserError
from hpctrain.text import NOTHING, format_count, format_duration, format_number, pluralize

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run import Run
    from hpctrain.jobs.runs.run_status import RunStatus
    from hpctrain.telemetry.live.top_view import TopSnapshot

_LOG_LINES = 20
#: A table has at most this number of runs, because reading the metrics of thousands would take minutes.
_MAX_RUNS = 200
#: Number of columns of a curve, and of the longest name, in a table.
_CURVE, _WIDEST_NAME = 30, 40

#: Formats the current state for a terminal of some columns and lines, as lines with their kinds.
_Format = Callable[[Sequence["TopSnapshot"], int, int], list[tuple[str, str]]]


@click.command("top")
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_runs)
@runs_dir_option
@click.option(
    "--filter",
    "terms",
    metavar="WORDS",
    help="Show the runs whose ids, states and hyper-parameters contain all WORDS, such as 'failed lr=0.1'.",
)
@click.option(
    "--once",
    is_flag=True,
    help="Print the view once and exit. This is the default if the output is not a terminal.",
)
@click.option(
    "--interval", type=click.FloatRange(min=0.2), default=1.0, metavar="SECONDS", help="Time between updates."
)
@json_option
def command(
    runs: tuple[str, ...], runs_dir: Path, terms: str | None, once: bool, interval: float, as_json: bool
) -> None:
    """Show a live view of RUN: state, step, remaining time, loss, speed, GPUs, events and log.

    For several runs or a sweep, or for all runs if RUN is omitted, show one line per run (at most 200),
    active and newer runs first. All loss curves have the same logarithmic scale.

    The view closes when all of these runs have ended. Ctrl-C closes the view and does not affect the runs.
    """
    from hpctrain.jobs.runs.run import list_runs
    from hpctrain.telemetry.live.top_view import format_view

    named = [open_run(run, runs_dir) for run in runs] or list_runs(runs_dir, os.environ)
    shown = [task for run in named for task in run.tasks() or [run]]
    is_single = len(runs) == len(shown) == 1 and terms is None
    snapshots = _snapshots(shown, (terms or "").lower().split())
    form: _Format = (lambda states, *size: format_view(states[0], *size)) if is_single else format_overview
    if as_json:
        documents = [snapshot.document() for snapshot in next(snapshots)]
        echo_json(documents[0] if is_single else documents)
    elif once or not sys.stdout.isatty():
        columns, lines = shutil.get_terminal_size() if sys.stdout.isatty() else (120, 40)
        for _, line in form(next(snapshots), columns, lines):
            click.echo(line)
    else:
        _show(snapshots, form, interval)


def format_overview(snapshots: Sequence[TopSnapshot], width: int, height: int) -> list[tuple[str, str]]:
    """Return a line per run, with loss curves on a common scale. See `format_view`."""
    from rich.cells import cell_len, set_cell_size

    from hpctrain.telemetry.live.top_view import cut_line, sparkline

    shown = snapshots[: max(1, height - 2)]
    rows = [("RUN", "STATE", "STEP", "LOSS", "LEFT")]
    for run in shown:
        last_step = "" if run.last_step is None else f" of {format_count(run.last_step)}"
        remaining = NOTHING if run.left_s is None else format_duration(run.left_s)
        step = format_count(run.step) + last_step
        rows.append((run.run_id, run.state, step, format_number(run.loss), remaining))
    widths = [min(_WIDEST_NAME, max(map(cell_len, column))) for column in zip(*rows, strict=True)]
    header, *texts = ["  ".join(map(set_cell_size, row, widths)) for row in rows]
    curves = [[math.log(loss) for loss in run.losses if loss > 0] for run in shown]
    losses = [loss for curve in curves for loss in curve]
    scale = (min(losses), max(losses)) if losses else None
    lines = [("title", f"{header}  CURVE")]
    for run, text, curve in zip(shown, texts, curves, strict=True):
        drawn = sparkline(curve, min(_CURVE, width - cell_len(text) - 2), scale)
        lines.append(("bad" if run.state == "FAILED" else "", f"{text}  {drawn}".rstrip()))
    if num_more := len(snapshots) - len(shown):
        lines.append(("soft", f"{pluralize(num_more, 'more run')}; --filter selects other runs"))
    return [(kind, cut_line(line, width)) for kind, line in lines]


class _LiveRun:
    """A run, with a reader of the records that it appends."""

    def __init__(self, run: Run) -> None:
        from hpctrain.record_types import Event, StepRecord
        from hpctrain.records.log_tail import RecordTail
        from hpctrain.telemetry.live.top_view import TopView

        self._run, self._view = run, TopView()
        self._events = RecordTail(run.dir.events, Event)
        self._metrics = RecordTail(run.dir.metrics, StepRecord)

    def snapshot(self, status: RunStatus) -> TopSnapshot:
        from hpctrain.record_types import NodeSample
        from hpctrain.records.log_tail import read_last_lines, read_last_records

        self._view.add_records(self._events.read_in_parts(), self._metrics.read_in_parts())
        log = status.log or self._run.log_path()
        paths = self._run.dir.all_telemetry()
        samples = (next(read_last_records(path, NodeSample), None) for path in paths)
        return self._view.snapshot(
            status.run_id,
            str(status.state),
            status.words,
            filter(None, samples),
            reports_steps=status.reports_steps,
            log=read_last_lines(Path(log), _LOG_LINES) if log else (),
        )


def _snapshots(runs: Sequence[Run], terms: Sequence[str]) -> Iterator[list[TopSnapshot]]:
    """Yield the state of the runs repeatedly, active and newer runs first, and once after their end."""
    from hpctrain.jobs.runs.run import query_statuses

    live_runs = {run.dir: _LiveRun(run) for run in reversed(runs)}
    statuses: list[RunStatus] = []
    queried = -QUERY_INTERVAL_S
    while True:
        # The state is queried before the files are read, so that no record before the end is missed.
        if time.monotonic() - queried >= QUERY_INTERVAL_S:
            matching = [
                status
                for status in query_statuses(runs[::-1], skip_unreadable=True)
                if not terms or _matches(status, terms)
            ]
            statuses = sorted(matching, key=lambda status: status.state.ended)[:_MAX_RUNS]
            queried = time.monotonic()
            if not statuses:
                raise UserError(
                    "No run matches (--filter, --runs-dir). Use `hpctrain list` to list all runs."
                )
        yield [live_runs[status.dir].snapshot(status) for status in statuses]
        if all(status.state.ended for status in statuses):
            return


def _matches(status: RunStatus, terms: Sequence[str]) -> bool:
    text = f"{status.run_id} {status.state} {hparams_text(status)}".lower()
    return all(term in text for term in terms)


def _show(snapshots: Iterator[list[TopSnapshot]], form: _Format, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    styles = {"title": "bold", "soft": "dim", "bad": "red"}
    console = Console(highlight=False)
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as screen:
        for states in snapshots:
            text = Text(no_wrap=True)
            for kind, line in form(states, console.width, console.height - 1):
                text.append(line + "\n", style=styles.get(kind, ""))
            screen.update(text, refresh=True)
            if any(run.state in ("RUNNING", "PENDING", "UNKNOWN") for run in states):
                time.sleep(interval)
