"""`hpctrain serve`: show all runs of a folder in the browser, with live updates."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.common import runs_dir_option
from hpctrain.errors import UserError

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus
    from hpctrain.rundir import RunDir

#: Seconds between two polls of a page, and between two queries to the scheduler.
_LIVE_S, _QUERY_INTERVAL_S = 3, 10.0
#: A page is reused for this multiple of its rendering time: a large run uses at most a fifth of a core of the
#: login node. The second value is the number of cached pages.
_CACHE_FACTOR, _MAX_CACHED_PAGES = 4.0, 8


@click.command("serve")
@runs_dir_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port to listen on. 0 chooses a free port.  [default: 0]",
)
def command(runs_dir: Path, port: int) -> None:
    """Show all runs in the browser, with live updates, until Ctrl-C.

    Listens on this machine only. Open the printed address. The token in the address keeps out other users
    and websites.
    """
    from hpctrain.telemetry.live.http_server import PageServer

    try:
        server = PageServer(RunPages(runs_dir), "127.0.0.1", port)
    except OSError as error:
        raise UserError(
            f"Cannot listen on port {port} (--port): {error.strerror}. Choose another port, or 0 for any "
            "free port."
        ) from error
    with server:
        click.echo(f"Runs in {runs_dir}: {server.address}")
        click.echo(
            "To open this address on your own machine, first run "
            f"`ssh -L {server.port}:127.0.0.1:{server.port} {os.uname().nodename}` there. "
            "Press Ctrl-C to stop."
        )
        with suppress(KeyboardInterrupt):
            server.serve_forever()


@dataclass
class _Page:
    """Cached page of a run."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    tag: str = ""
    text: str = ""
    good_until: float = 0.0


class RunPages:
    """The runs of a folder as pages."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._lock = threading.Lock()
        self._asked = -_QUERY_INTERVAL_S
        self._known: dict[str, RunStatus] = {}
        self._num_omitted = 0
        self._pages: OrderedDict[str, _Page] = OrderedDict()

    def tag(self, run_id: str | None) -> str | None:
        known = self._statuses()
        if run_id is None:
            return _digest([*known.values(), self._num_omitted])
        if run_id not in known:
            return None
        kept = self._pages.get(run_id)
        if kept is not None and time.monotonic() < kept.good_until:
            return kept.tag
        return _tag_of(known[run_id])

    def page(self, run_id: str | None) -> str:
        from hpctrain.telemetry.report.index_page import RunRow, render_index_page

        if run_id is not None:
            return self._page_of(run_id)
        rows = [
            RunRow(**{column.name: getattr(one, column.name) for column in fields(RunRow)})
            for one in reversed(self._statuses().values())
        ]
        folder = str(self._runs_dir.absolute())
        return render_index_page(folder, rows, live_s=_LIVE_S, num_omitted=self._num_omitted)

    def _page_of(self, run_id: str) -> str:
        """Return the page of a run, cached for all clients; large ones are updated less often."""
        status = self._statuses()[run_id]
        with self._lock:
            kept = self._pages.setdefault(run_id, _Page())
            self._pages.move_to_end(run_id)
            while len(self._pages) > _MAX_CACHED_PAGES:
                self._pages.popitem(last=False)
        with kept.lock:
            tag = _tag_of(status)
            if tag != kept.tag and time.monotonic() >= kept.good_until:
                begun = time.monotonic()
                kept.text, kept.tag = self._render(status), tag
                made = time.monotonic()
                kept.good_until = made + _CACHE_FACTOR * (made - begun)
            return kept.text

    def _render(self, status: RunStatus) -> str:
        from hpctrain.cli.report import read_runs
        from hpctrain.telemetry.report.comparison_page import render_comparison
        from hpctrain.telemetry.report.run_page import render_run_page

        facts = read_runs(status.run_dir, self._runs_dir)
        if len(facts) == 1:
            return render_run_page(facts[0], live_s=_LIVE_S)
        return render_comparison(facts, live_s=_LIVE_S)

    def _statuses(self) -> dict[str, RunStatus]:
        """Return all runs by id, including tasks of job arrays; queried at intervals."""
        from hpctrain.jobs.runs.run import list_runs, query_statuses

        with self._lock:
            if time.monotonic() - self._asked >= _QUERY_INTERVAL_S or not self._known:
                here = self._runs_dir.resolve()
                found = list_runs(self._runs_dir, os.environ)
                found += [task for run in found for task in run.tasks()]
                runs = [run for run in found if run.dir.path.resolve().is_relative_to(here)]
                self._num_omitted = len(found) - len(runs)
                self._known = {one.run_id: one for one in query_statuses(runs, skip_unreadable=True)}
                self._asked = time.monotonic()
            return self._known


def _tag_of(status: RunStatus) -> str:
    return _digest([status, *_written(status)])


def _written(status: RunStatus) -> Iterator[tuple[str, int, int]]:
    """Yield size and modification time of the files of a run."""
    from hpctrain.rundir import RunDir

    run = RunDir(Path(status.run_dir))
    runs: list[RunDir] = [run, *(run.task(index) for index in run.tasks())]
    for one in runs:
        for path in (one.events, one.metrics, *one.all_telemetry()):
            try:
                found = path.stat()
            except OSError:
                continue
            yield str(path), found.st_size, found.st_mtime_ns


def _digest(values: Iterable[object]) -> str:
    return hashlib.sha256(repr(list(values)).encode()).hexdigest()[:32]
