"""Show runs on pages, written to a file or served to a browser (`hpctrain report`, `hpctrain serve`)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.common import (
    complete_runs,
    format_step,
    json_option,
    json_text,
    open_run,
    runs_dir_option,
    short_path,
)
from hpctrain.errors import HpctrainError, RunNotFound, UserError
from hpctrain.files import write_atomic
from hpctrain.rundir import RunDir
from hpctrain.text import NOTHING, format_number, format_time, printable

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus
    from hpctrain.telemetry.report.run_data import RunData

#: Seconds between two polls of a served page, and between two queries to the scheduler.
_LIVE_S, QUERY_INTERVAL_S = 3, 10.0
#: A page is reused for this multiple of its rendering time: a large run uses at most a fifth of a core of the
#: login node. The second value is the number of cached pages.
_CACHE_FACTOR, _MAX_CACHED_PAGES = 4.0, 8
#: Maximum number of logs on the page of a run, and of lines of each.
_MAX_LOGS, _LOG_LINES = 8, 100


@click.command("report")
@click.argument("runs", metavar="RUN [RUN …]", nargs=-1, required=True, shell_complete=complete_runs)
@runs_dir_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Output file, or - for standard output.  [default: report.html in the folder of the run or job "
    "array; - with --json]",
)
@json_option
def command(runs: tuple[str, ...], runs_dir: Path, output: Path | None, as_json: bool) -> None:
    """Generate a one-page report of RUN: loss, restarts, timeline, time breakdown, and how to reproduce it.

    RUN may be active, damaged or without metrics; the report then shows the available data. Several runs, or
    the tasks of a job array, are compared.
    """
    suffix = "" if output is None else output.suffix.lower()
    if suffix not in ("", ".htm", ".html", ".json"):
        raise UserError(
            f"{output} (--output) ends in {suffix}, which is not a report format. Use .html or .json."
        )
    as_json = as_json or suffix == ".json"
    run_data = [task for run in runs for task in read_runs(run, runs_dir)]
    text = _render(run_data, as_json=as_json)
    if output is None:
        output = Path("-") if as_json else _default_output(runs, run_data)
    if str(output) == "-":
        click.echo(text, nl=not text.endswith("\n"))
        return
    try:
        write_atomic(output, text.encode(errors="backslashreplace"), durable=False)
    except OSError as error:
        raise UserError(
            f"Cannot write the report to {output} (--output): {error.strerror}. Choose another file."
        ) from error
    click.echo(f"Report written to {short_path(output)}")


def _default_output(runs: Sequence[str], run_data: list[RunData]) -> Path:
    folder = RunDir(Path(run_data[0].folder))
    if len(run_data) == 1:
        return folder.report
    if len(runs) == 1 and folder.array is not None:
        return folder.array.report
    raise UserError(
        f"Comparing {len(run_data)} runs requires an output file, such as --output comparison.html."
    )


def _render(run_data: list[RunData], *, as_json: bool) -> str:
    from hpctrain.telemetry.report.pages import render_comparison, render_run_page

    if as_json:
        documents = [json_report(run) for run in run_data]
        return json_text(documents if len(documents) > 1 else documents[0], default=str) + "\n"
    return render_comparison(run_data) if len(run_data) > 1 else render_run_page(run_data[0])


def json_report(run_data: RunData) -> dict[str, Any]:
    from hpctrain.telemetry.report.advice import advise

    breakdown, curves, devices = run_data.breakdown, run_data.curves, run_data.devices
    lowest = curves.lowest("loss")
    fields = (
        *("run_id", "folder", "state", "cause", "start", "end", "reports_steps", "step", "steps_per_s"),
        *("hparams", "environment", "spec", "notes"),
    )
    return {
        **{name: getattr(run_data, name) for name in fields},
        "wall_us": breakdown.wall_us,
        "loss": curves.last("loss"),
        "loss_is_no_number_since": curves.no_number_since("loss"),
        "best": run_data.best and asdict(run_data.best),
        "lowest_loss": lowest and {"step": lowest[0], "loss": lowest[1]},
        "last": {name: curves.last(name) for name in curves.names},
        "lost_steps": breakdown.lost_steps,
        "ledger": [
            {
                "what": category.value,
                "us": us if (measured := category in breakdown.measured) else None,
                "measured": measured,
            }
            for category, us in breakdown.totals_us.items()
        ],
        **asdict(run_data.goodput),
        "energy": run_data.energy and asdict(run_data.energy),
        "attempts": [
            {**asdict(attempt), "interrupted": attempt.interrupted} for attempt in run_data.attempts
        ],
        "checkpoints": [asdict(checkpoint) for checkpoint in run_data.checkpoints],
        "gpus": [{"gpu": gpu, **means} for gpu, means in zip(devices.gpus, devices.gpu_means, strict=True)],
        "nodes": [
            {**asdict(node), **means} for node, means in zip(devices.nodes, devices.node_means, strict=True)
        ],
        "advice": [asdict(advice) for advice in advise(run_data)],
        "code": [
            {"commit": code.commit, "changed": code.changed, "new_files": code.new_files}
            for code in run_data.codes
        ],
        "again": run_data.resubmit_command,
    }


def read_runs(name: str, runs_dir: Path) -> list[RunData]:
    from hpctrain.telemetry.report.run_data import RunData

    time_now = time.time()
    try:
        opened = open_run(name, runs_dir)
    except RunNotFound:
        # A run started without a submission, or an incomplete folder.
        for folder in (RunDir((runs_dir / name).absolute()), RunDir(Path(name).absolute())):
            if folder.events.is_file() or folder.metrics.is_file():
                return [RunData(folder, now=time_now)]
        raise
    from hpctrain.cli.resume import resubmit_command
    from hpctrain.jobs.runs.run import query_statuses
    from hpctrain.jobspec.redaction import redact_spec
    from hpctrain.telemetry.report.run_results import read_spec

    if read_spec(opened.dir.spec).get("supervised") is False:
        raise UserError(
            f"Run {opened.run_id} ran without hpctrain in the job (--template plain), so it has no records "
            f"for a report. Its logs: hpctrain logs {opened.run_id}"
        )
    runs = opened.tasks() or [opened]
    try:
        statuses = query_statuses(runs, skip_unreadable=True)
    except (HpctrainError, OSError):
        statuses = []
    run_data = []
    for run, status in zip_longest(runs, statuses):
        command = resubmit_command(redact_spec(read_spec(run.dir.spec)))
        facts = () if status is None else (str(status.state), status.words, status.cause)
        run_data.append(RunData(run.dir, *facts, now=time_now, resubmit_command=command))
    return run_data


@click.command("serve")
@runs_dir_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port to listen on. 0 chooses a free port.  [default: 0]",
)
def serve_command(runs_dir: Path, port: int) -> None:
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
    run = RunDir(Path(status.run_dir))
    if status.tasks is not None:
        return ""
    return _cached_hparams(run, tuple(_stat([run.spec, run.environment])))


@lru_cache(maxsize=10_000)
def _cached_hparams(run: RunDir, stamps: tuple[object, ...]) -> str:  # noqa: ARG001 (changes with the files)
    from hpctrain.telemetry.report.run_results import read_results

    hparams = read_results(run, with_metrics=False).hparams
    return " ".join(f"{name}={value}" for name, value in hparams.items())


def _read_logs(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield the last lines of the newest logs of a run, that of its failure first."""
    from hpctrain.records.log_tail import read_last_lines

    run = RunDir(Path(status.run_dir))
    paths = [*([Path(status.log)] if status.log else []), *_newest_logs(run)]
    for path in list(dict.fromkeys(paths))[:_MAX_LOGS]:
        is_inside = path.is_relative_to(run.path)
        if is_inside and (lines := read_last_lines(path, _LOG_LINES, follow_links=False)):
            yield str(path.relative_to(run.path)), "\n".join(map(printable, lines))


def _newest_logs(run: RunDir) -> list[Path]:
    attempts = run.attempts()
    ranks = run.ranks(attempts[-1])[:_MAX_LOGS] if attempts else []
    return [run.rank_log(attempts[-1], rank) for rank in ranks]


def _tag_of(statuses: Sequence[RunStatus]) -> str:
    """Return a digest of the states, and of the sizes and times of the files of runs."""
    paths: list[Path] = []
    for run in (RunDir(Path(status.run_dir)) for status in statuses):
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
