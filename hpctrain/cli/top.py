"""`hpctrain top`: a run as it trains."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.common import echo_json, handle_of, json_option, open_run, run_argument
from hpctrain.errors import UserError

if TYPE_CHECKING:
    from hpctrain.jobs.runs import Run
    from hpctrain.telemetry.live import Snapshot

#: Seconds between two questions to the scheduler; files are looked at more often.
_ASK_S = 10.0


@click.command("top")
@run_argument
@click.option("--once", is_flag=True, help="Print one look and end; so it is where there is no terminal.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@json_option
def command(run: str, runs_dir: Path, once: bool, interval: float, as_json: bool) -> None:
    """Show RUN as it trains: state, step and time left, loss, speed, GPUs, events; Ctrl-C only stops looking.

    The view ends when the run does.
    """
    found = open_run(run, runs_dir)
    if tasks := found.tasks():
        raise UserError(
            f"Run {found.run_id} is a job array of {len(tasks)} tasks. Name one, "
            f"such as {handle_of(str(tasks[0].dir.path))}."
        )
    looks = _looks(found)
    if as_json:
        echo_json(next(looks).document())
    elif once or not sys.stdout.isatty():
        from hpctrain.telemetry.live import as_lines

        for _, line in as_lines(next(looks), *_size()):
            click.echo(line)
    else:
        _show(looks, interval)


def _looks(run: Run) -> Iterator[Snapshot]:
    """Where the run stands, again and again; the last look is that after its end."""
    from hpctrain.jobs.tail import RecordTail
    from hpctrain.telemetry.live import Live

    live = Live()
    events, metrics = RecordTail(run.dir.events), RecordTail(run.dir.metrics)
    asked, status = -_ASK_S, None
    while True:
        # First the question, then the reading: what was written before the end is not missed.
        if status is None or time.monotonic() - asked >= _ASK_S:
            status, asked = run.status(), time.monotonic()
        live.take(events.read_in_parts(), metrics.read_in_parts())
        yield live.snapshot(run.run_id, str(status.state), status.words, _last_lines(run))
        if status.state.ended:
            return


def _last_lines(run: Run) -> Iterator[Mapping[str, Any]]:
    """What each node measured last."""
    from hpctrain.jobs.tail import last_records

    for path in run.dir.all_telemetry():
        if (line := next(last_records(path), None)) is not None:
            yield line


def _show(looks: Iterator[Snapshot], interval: float) -> None:
    """Draw on the terminal until the run has ended."""
    from rich.console import Console
    from rich.live import Live as Screen
    from rich.text import Text

    from hpctrain.telemetry.live import as_lines

    styles = {"title": "bold", "soft": "dim", "bad": "red"}
    console = Console(highlight=False)
    with Screen(console=console, auto_refresh=False) as screen:
        try:
            for look in looks:
                text = Text(no_wrap=True)
                for kind, line in as_lines(look, console.width, console.height - 1):
                    text.append(line + "\n", style=styles.get(kind, ""))
                screen.update(text, refresh=True)
                if look.state in ("RUNNING", "PENDING", "UNKNOWN"):
                    time.sleep(interval)
        except KeyboardInterrupt:
            pass


def _size() -> tuple[int, int]:
    """Columns and lines for what is printed once; a file has no end of either."""
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        return size.columns, size.lines
    return 120, 40
