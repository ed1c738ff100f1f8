"""`hpctrain serve`: show all runs of a folder in the browser, with live updates."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.common import runs_dir_option
from hpctrain.errors import UserError
from hpctrain.text import printable

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus
    from hpctrain.rundir import RunDir

#: Seconds between two polls of a page, and between two queries to the scheduler.
_LIVE_S, _QUERY_INTERVAL_S = 3, 10.0
#: A page is reused for this multiple of its rendering time: a large run uses at most a fifth of a core of the
#: login node. The second value is the number of cached pages.
_CACHE_FACTOR, _MAX_CACHED_PAGES = 4.0, 8
#: Maximum number of logs on the page of a run, and of lines of each.
_MAX_LOGS, _LOG_LINES = 8, 100


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

    On the pages, you can compare runs, and read their logs.

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
    """Cached page of one or several runs."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    tag: str = ""
    text: str = ""
    good_until: float = 0.0


class RunPages:
    """The runs of a folder as pages: the list, one run, or a comparison of several."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._lock = threading.Lock()
        self._asked = -_QUERY_INTERVAL_S
        self._known: dict[str, RunStatus] = {}
        self._num_omitted = 0
        self._pages: OrderedDict[tuple[str, ...], _Page] = OrderedDict()
        self._hparams: dict[str, tuple[object, Mapping[str, Any]]] = {}

    def tag(self, run_ids: tuple[str, ...]) -> str | None:
        known = self._statuses()
        if not run_ids:
            return _digest([*known.values(), self._num_omitted])
        if not known.keys() >= set(run_ids):
            return None
        kept = self._pages.get(run_ids)
        if kept is not None and time.monotonic() < kept.good_until:
            return kept.tag
        return _tag_of([known[run_id] for run_id in run_ids])

    def page(self, run_ids: tuple[str, ...]) -> str:
        from hpctrain.telemetry.report.html_renderer import LiveParts
        from hpctrain.telemetry.report.index_page import RunRow, render_index_page

        if run_ids:
            return self._page_of(run_ids)
        copied = [column.name for column in fields(RunRow) if column.name != "hparams"]
        rows = [
            RunRow(**{name: getattr(one, name) for name in copied}, hparams=self._hparams_of(one))
            for one in reversed(self._statuses().values())
        ]
        folder = str(self._runs_dir.absolute())
        return render_index_page(folder, rows, live=LiveParts(_LIVE_S), num_omitted=self._num_omitted)

    def _page_of(self, run_ids: tuple[str, ...]) -> str:
        """Return a page, cached for all clients; those of large runs are updated less often."""
        known = self._statuses()
        statuses = [known[run_id] for run_id in run_ids]
        with self._lock:
            kept = self._pages.setdefault(run_ids, _Page())
            self._pages.move_to_end(run_ids)
            while len(self._pages) > _MAX_CACHED_PAGES:
                self._pages.popitem(last=False)
        with kept.lock:
            tag = _tag_of(statuses)
            if tag != kept.tag and time.monotonic() >= kept.good_until:
                begun = time.monotonic()
                kept.text, kept.tag = self._render(statuses), tag
                made = time.monotonic()
                kept.good_until = made + _CACHE_FACTOR * (made - begun)
            return kept.text

    def _render(self, statuses: Sequence[RunStatus]) -> str:
        from hpctrain.cli.report import read_runs
        from hpctrain.telemetry.report.comparison_page import render_comparison
        from hpctrain.telemetry.report.html_renderer import LiveParts
        from hpctrain.telemetry.report.run_page import render_run_page

        facts = [run for status in statuses for run in read_runs(status.run_dir, self._runs_dir)]
        if len(facts) == 1:
            return render_run_page(facts[0], live=LiveParts(_LIVE_S, list(_read_logs(statuses[0]))))
        return render_comparison(facts, live=LiveParts(_LIVE_S))

    def _hparams_of(self, status: RunStatus) -> Mapping[str, Any]:
        """Return the hyper-parameters of a run; its files are read again only after a change."""
        from hpctrain.rundir import RunDir
        from hpctrain.telemetry.hparams import merge_hparams
        from hpctrain.telemetry.report.artifacts import read_environment, read_spec

        if status.tasks is not None:
            return {}
        run = RunDir(Path(status.run_dir))
        written = list(_stat([run.spec, run.environment]))
        if self._hparams.get(status.run_id, (None,))[0] != written:
            found = merge_hparams(read_spec(run.spec), read_environment(run))
            self._hparams[status.run_id] = written, found
        return self._hparams[status.run_id][1]

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


def _read_logs(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield the last lines of the newest logs of a run, that of its failure first."""
    from hpctrain.records.log_tail import read_last_lines
    from hpctrain.rundir import RunDir

    run = RunDir(Path(status.run_dir))
    paths = [*([Path(status.log)] if status.log else []), *_newest_logs(run)]
    for path in list(dict.fromkeys(paths))[:_MAX_LOGS]:
        is_inside = path.is_relative_to(run.path)
        if is_inside and (lines := read_last_lines(path, _LOG_LINES, follow_links=False)):
            yield str(path.relative_to(run.path)), "\n".join(map(printable, lines))


def _newest_logs(run: RunDir) -> list[Path]:
    """Return the logs of the first ranks in the newest attempt."""
    attempts = run.attempts()
    ranks = run.ranks(attempts[-1])[:_MAX_LOGS] if attempts else []
    return [run.rank_log(attempts[-1], rank) for rank in ranks]


def _tag_of(statuses: Sequence[RunStatus]) -> str:
    return _digest([*statuses, *(each for status in statuses for each in _written(status))])


def _written(status: RunStatus) -> Iterator[tuple[str, int, int]]:
    """Yield size and modification time of the files of a run."""
    from hpctrain.rundir import RunDir

    run = RunDir(Path(status.run_dir))
    for one in (run, *map(run.task, run.tasks())):
        yield from _stat([one.events, one.metrics, *one.all_telemetry()])
    yield from _stat(_newest_logs(run))


def _stat(paths: Iterable[Path]) -> Iterator[tuple[str, int, int]]:
    for path in paths:
        try:
            found = path.stat()
        except OSError:
            continue
        yield str(path), found.st_size, found.st_mtime_ns


def _digest(values: Iterable[object]) -> str:
    return hashlib.sha256(repr(list(values)).encode()).hexdigest()[:32]
