"""Serve the pages of all runs to a browser (`hpctrain serve`)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.common import format_step, runs_dir_option
from hpctrain.cli.report import read_runs
from hpctrain.errors import UserError
from hpctrain.rundir import RunDir
from hpctrain.text import NOTHING, format_number, format_time, printable

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus

#: Seconds between two polls of a served page, and between two queries to the scheduler.
_LIVE_S, QUERY_INTERVAL_S = 3, 10.0
#: A page is reused for this multiple of its rendering time: a large run uses at most a fifth of a core of the
#: login node. The second value is the number of cached pages.
_CACHE_FACTOR, _MAX_CACHED_PAGES = 4.0, 8
#: Maximum number of logs on the page of a run, and of lines of each.
_MAX_LOGS, _LOG_LINES = 8, 100


@click.command("serve")
@runs_dir_option
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on. 0 chooses a free port."
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


class RunPages:
    """The runs of a folder as pages: the list, one run, or a comparison of several."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._query_lock, self._render_lock = threading.Lock(), threading.Lock()
        self._queried = -QUERY_INTERVAL_S
        self._runs: dict[str, RunStatus] = {}
        self._num_omitted = 0
        #: Tags, texts, and times until which a changed page is not rendered again.
        self._pages: dict[tuple[str, ...], tuple[str, str, float]] = {}

    def tag(self, run_ids: tuple[str, ...]) -> str | None:
        runs = self._statuses()
        if not run_ids:
            return _digest([*runs.values(), self._num_omitted])
        if not runs.keys() >= set(run_ids):
            return None
        tag, _, expires = self._pages.get(run_ids, ("", "", 0.0))
        return tag if time.monotonic() < expires else _tag_of([runs[run_id] for run_id in run_ids])

    def page(self, run_ids: tuple[str, ...]) -> str:
        if not run_ids:
            return self._list()
        runs = self._statuses()
        statuses = [runs[run_id] for run_id in run_ids]
        # Pages are rendered one at a time, because rendering is limited by Python's lock.
        with self._render_lock:
            new_tag = _tag_of(statuses)
            tag, text, expires = self._pages.pop(run_ids, ("", "", 0.0))
            if tag != new_tag and time.monotonic() >= expires:
                begin = time.monotonic()
                tag, text, end = new_tag, self._render(statuses), time.monotonic()
                expires = end + _CACHE_FACTOR * (end - begin)
            self._pages[run_ids] = tag, text, expires
            if len(self._pages) > _MAX_CACHED_PAGES:
                del self._pages[next(iter(self._pages))]
            return text

    def _list(self) -> str:
        from hpctrain.telemetry.report.pages import LiveParts, render_page

        folder = str(self._runs_dir.absolute())
        rows = [
            {
                "name": status.run_id,
                "state": status.state,
                "attempt": NOTHING if status.attempt is None else status.attempt,
                "step": format_step(status),
                "loss": format_number(status.loss),
                "submitted": format_time(status.submitted),
                "words": " ".join([status.words, hparams_text(status)]),
            }
            for status in reversed(self._statuses().values())
        ]
        return render_page(
            "runs.html.j2",
            title=f"Runs in {folder}",
            live=LiveParts(_LIVE_S),
            folder=folder,
            rows=rows,
            num_omitted=self._num_omitted,
        )

    def _render(self, statuses: Sequence[RunStatus]) -> str:
        from hpctrain.telemetry.report.pages import LiveParts, render_comparison, render_run_page

        runs = [run for status in statuses for run in read_runs(status.run_dir, self._runs_dir)]
        if len(runs) == 1:
            return render_run_page(runs[0], live=LiveParts(_LIVE_S, list(_read_logs(statuses[0]))))
        return render_comparison(runs, live=LiveParts(_LIVE_S))

    def _statuses(self) -> dict[str, RunStatus]:
        """Return all runs by id, including tasks of job arrays; queried at intervals."""
        from hpctrain.jobs.runs.run import list_runs, query_statuses

        with self._query_lock:
            if time.monotonic() - self._queried >= QUERY_INTERVAL_S or not self._runs:
                folder = self._runs_dir.resolve()
                listed = list_runs(self._runs_dir, os.environ)
                listed += [task for run in listed for task in run.tasks()]
                runs = [run for run in listed if run.dir.path.resolve().is_relative_to(folder)]
                self._num_omitted = len(listed) - len(runs)
                self._runs = {status.run_id: status for status in query_statuses(runs, skip_unreadable=True)}
                self._queried = time.monotonic()
            return self._runs


def hparams_text(status: RunStatus) -> str:
    """Return the hyper-parameters of a run; empty for a job array."""
    if status.tasks is not None:
        return ""
    run = status.dir
    return _cached_hparams(run, tuple(_stat([run.spec, run.environment])))


@lru_cache(maxsize=10_000)
def _cached_hparams(run: RunDir, stamps: tuple[object, ...]) -> str:  # noqa: ARG001 (changes with the files)
    from hpctrain.telemetry.report.run_results import read_results

    hparams = read_results(run, with_metrics=False).hparams
    return " ".join(f"{name}={value}" for name, value in hparams.items())


def _read_logs(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield the last lines of the newest logs of a run, that of its failure first."""
    from hpctrain.records.log_tail import read_last_lines

    run = status.dir
    paths = [*([Path(status.log)] if status.log else []), *_newest_logs(run)]
    for path in list(dict.fromkeys(paths))[:_MAX_LOGS]:
        is_inside = path.is_relative_to(run.path)
        if is_inside and (lines := read_last_lines(path, _LOG_LINES, follow_links=False)):
            yield str(path.relative_to(run.path)), "\n".join(map(printable, lines))


def _newest_logs(run: RunDir) -> list[Path]:
    attempts = run.attempts()
    logs = run.rank_logs(attempts[-1]).values() if attempts else ()
    return [log for _, log in logs][:_MAX_LOGS]


def _tag_of(statuses: Sequence[RunStatus]) -> str:
    """Return a digest of the states, and of the sizes and times of the files of runs."""
    paths: list[Path] = []
    for status in statuses:
        run = status.dir
        for task in (run, *map(run.task, run.tasks())):
            paths += [task.events, task.metrics, *task.all_telemetry()]
        paths += _newest_logs(run)
    return _digest([*statuses, *_stat(paths)])


def _stat(paths: Iterable[Path]) -> Iterator[tuple[str, int, int]]:
    for path in paths:
        with suppress(OSError):
            stat = path.stat()
            yield str(path), stat.st_size, stat.st_mtime_ns


def _digest(values: Iterable[object]) -> str:
    import hashlib

    return hashlib.sha256(repr(list(values)).encode()).hexdigest()[:32]
