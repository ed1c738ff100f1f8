"""`hpctrain top`: show a live view of a run."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.common import echo_json, json_option, open_run, run_argument, run_reference
from hpctrain.errors import UserError

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run import Run
    from hpctrain.telemetry.live.top_view import TopSnapshot

#: Seconds between two queries to the scheduler; files are read more often.
_QUERY_INTERVAL_S = 10.0


@click.command("top")
@run_argument
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
def command(run: str, runs_dir: Path, once: bool, interval: float, as_json: bool) -> None:
    """Show a live view of RUN: state, step, remaining time, loss, speed, GPUs and events.

    The view closes when the run ends. Ctrl-C closes the view and does not affect the run.
    """
    found = open_run(run, runs_dir)
    if tasks := found.tasks():
        raise UserError(
            f"Run {found.run_id} is a job array of {len(tasks)} tasks. Specify a task, such as "
            f"{run_reference(str(tasks[0].dir.path))}."
        )
    looks = _looks(found)
    if as_json:
        echo_json(next(looks).document())
    elif once or not sys.stdout.isatty():
        from hpctrain.telemetry.live.top_view import format_view

        for _, line in format_view(next(looks), *_size()):
            click.echo(line)
    else:
        _show(looks, interval)


def _looks(run: Run) -> Iterator[TopSnapshot]:
    """Yield the current state of the run repeatedly, finally after its end."""
    from hpctrain.records.log_tail import RecordTail
    from hpctrain.telemetry.live.top_view import TopView

    live = TopView()
    events, metrics = RecordTail(run.dir.events), RecordTail(run.dir.metrics)
    asked, status = -_QUERY_INTERVAL_S, None
    while True:
        # The state is queried before the files are read, so that no record before the end is missed.
        if status is None or time.monotonic() - asked >= _QUERY_INTERVAL_S:
            status, asked = run.status(), time.monotonic()
        live.add_records(events.read_in_parts(), metrics.read_in_parts())
        yield live.snapshot(
            run.run_id, str(status.state), status.words, _last_lines(run), reports_steps=status.reports_steps
        )
        if status.state.ended:
            return


def _last_lines(run: Run) -> Iterator[Mapping[str, Any]]:
    """Yield the last measurement of each node."""
    from hpctrain.records.log_tail import read_last_records

    for path in run.dir.all_telemetry():
        if (line := next(read_last_records(path), None)) is not None:
            yield line


def _show(looks: Iterator[TopSnapshot], interval: float) -> None:
    """Draw on the terminal until the run has ended."""
    from rich.console import Console
    from rich.live import Live as Screen
    from rich.text import Text

    from hpctrain.telemetry.live.top_view import format_view

    styles = {"title": "bold", "soft": "dim", "bad": "red"}
    console = Console(highlight=False)
    with Screen(console=console, auto_refresh=False) as screen:
        try:
            for look in looks:
                text = Text(no_wrap=True)
                for kind, line in format_view(look, console.width, console.height - 1):
                    text.append(line + "\n", style=styles.get(kind, ""))
                screen.update(text, refresh=True)
                if look.state in ("RUNNING", "PENDING", "UNKNOWN"):
                    time.sleep(interval)
        except KeyboardInterrupt:
            pass


def _size() -> tuple[int, int]:
    """Return columns and lines for the one-time output; fixed values if stdout is not a terminal."""
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        return size.columns, size.lines
    return 120, 40
