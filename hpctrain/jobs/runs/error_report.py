"""Error reports on runs: per failed attempt, the full cause and a summary of the other errors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from hpctrain.files import read_json
from hpctrain.records.crash_output import fold, useful_lines
from hpctrain.records.log_tail import read_last_lines
from hpctrain.rundir import RunDir, is_new_submission
from hpctrain.text import format_ranks

#: Lines of the log to show if a rank exited without a traceback.
_LAST_LINES = 20
#: Lines of the log in which these are searched: crash handlers print long native stacks.
_SEARCHED_LINES = 500


def failures_since_submission(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the failures in these events since the user's last submission, oldest first."""
    failures: list[dict[str, Any]] = []
    for event in events:
        if is_new_submission(event):
            failures.clear()
        elif event.get("kind") == "failure":
            failures.append(event)
    return failures


def failures_of_attempt(events: Iterable[dict[str, Any]], attempt: int) -> list[dict[str, Any]]:
    """Return the failures of an attempt of any submission, oldest first."""
    return [
        event for event in events if event.get("kind") == "failure" and event.get("attempt", 0) == attempt
    ]


def report_failure(run: RunDir, failure: dict[str, Any], ranks: Collection[int] = ()) -> Iterator[str]:
    yield f"attempt {failure.get('attempt', 0)}: {failure.get('cause')}"
    yield from details(run, failure, ranks)


def details(run: RunDir, failure: dict[str, Any], ranks: Collection[int] = ()) -> Iterator[str]:
    """Yield the traceback of the rank that failed first, and one line per error that followed."""
    attempt = int(failure.get("attempt", 0))
    records = _records(run, attempt)
    in_full = [rank for rank in sorted(records) if rank in (ranks or (failure.get("rank"),))]
    for rank in in_full:
        if ranks:
            node = records[rank].get("node") or records[rank].get("host")
            yield f"rank {rank} on {node}: {_summary(records[rank])}"
        yield from _details(records[rank])
    if not in_full and not ranks and failure.get("log"):
        yield from _end_of(str(failure["log"]))
    if not ranks:
        summaries = {rank: _summary(record) for rank, record in records.items() if rank not in in_full}
        for summary, group in groupby(
            sorted(summaries, key=lambda rank: (summaries[rank], rank)), summaries.__getitem__
        ):
            yield f"also {format_ranks(list(group))}: {summary}"


def rank_traceback(run: RunDir, failure: dict[str, Any]) -> list[str]:
    """Return the traceback of the rank that failed first, as lines; empty if there is none."""
    record = _records(run, int(failure.get("attempt", 0))).get(int(failure.get("rank", -1)), {})
    return fold(str(record.get("traceback") or "")).rstrip().splitlines()


def job_log_tail(log: str | None) -> list[str]:
    """Return the end of the log of the batch script if `log` is that file, otherwise nothing."""
    if log is None or Path(log).name != RunDir(Path()).slurm_log.name:
        return []
    return read_last_lines(Path(log), _LAST_LINES)


def crashed_log_tail(run: RunDir, attempt: int) -> list[str]:
    """Return the end of the first log of a rank that shows a crash, for a run without failure records."""
    for rank in run.ranks(attempt):
        log = run.rank_log(attempt, rank)
        if any("Traceback (most recent" in line for line in read_last_lines(log, _SEARCHED_LINES)):
            return list(_end_of(str(log)))
    return []


def _details(record: dict[str, Any]) -> Iterator[str]:
    if traceback := str(record.get("traceback") or ""):
        yield from fold(traceback).rstrip().split("\n")
        yield f"log: {record.get('log')}"
    else:
        yield from _end_of(str(record.get("log")))


def _end_of(log: str) -> Iterator[str]:
    lines = useful_lines(read_last_lines(Path(log), _SEARCHED_LINES))[-_LAST_LINES:]
    yield f"last lines of {log}:" if lines else f"log: {log}"
    yield from (f"  {line}" for line in lines)


def _records(run: RunDir, attempt: int) -> dict[int, dict[str, Any]]:
    records = {}
    for path in run.failure_files(attempt):
        try:
            record = read_json(path)
            records[int(record["rank"])] = record
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            continue  # still being written
    return records


def _summary(record: dict[str, Any]) -> str:
    message = str(record.get("message") or "").split("\n", 1)[0]
    return f"{record.get('error')}: {message}" if message else str(record.get("error"))
