"""What went wrong in a run: of each attempt that failed the cause in full, and the rest of it in short."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from hpctrain.jobs.tail import last_lines
from hpctrain.rundir import RunDir

#: Lines of a log that are shown where a rank ended without a traceback.
_LAST_LINES = 20


def failures_since_submission(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The failures in these events, oldest first, since the run was last submitted."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event.get("kind") == "submitted":
            found = []
        elif event.get("kind") == "failure":
            found.append(event)
    return found


def report(run: RunDir, failure: dict[str, Any], ranks: Collection[int] = ()) -> Iterator[str]:
    """Yield the report on one failure, line by line.

    The rank that failed first is shown with its traceback, or with the end of its log where it died without
    one. Others mostly failed of that, so they are listed, those that say the same together.

    Args:
        run: the run.
        failure: the event.
        ranks: ranks that are shown in full, instead of the first one.
    """
    attempt = int(failure.get("attempt", 0))
    yield f"attempt {attempt}: {failure.get('cause')}"
    records = _records(run, attempt)
    in_full = [rank for rank in sorted(records) if rank in (ranks or (failure.get("rank"),))]
    for rank in in_full:
        if ranks:
            yield f"rank {rank} on {_host(records[rank])}: {_summary(records[rank])}"
        yield from _details(records[rank])
    if not in_full and not ranks and failure.get("log"):
        yield from _end_of(str(failure["log"]))
    if not ranks:
        rest = {rank: _summary(record) for rank, record in records.items() if rank not in in_full}
        for words, same in groupby(sorted(rest, key=lambda rank: (rest[rank], rank)), rest.__getitem__):
            yield f"also {name_ranks(list(same))}: {words}"


def traceback_of(run: RunDir, failure: dict[str, Any]) -> list[str]:
    """The traceback of the rank that failed first, in lines; none where it left none."""
    record = _records(run, int(failure.get("attempt", 0))).get(int(failure.get("rank", -1)), {})
    return str(record.get("traceback") or "").rstrip().splitlines()


def end_of_job_log(log: str | None) -> list[str]:
    """The end of what the batch script and Slurm print, where that is the log that tells of a failure."""
    if log is None or Path(log).name != RunDir(Path()).slurm_log.name:
        return []
    return last_lines(Path(log), _LAST_LINES)


def _details(record: dict[str, Any]) -> Iterator[str]:
    if traceback := str(record.get("traceback") or ""):
        yield from traceback.rstrip().split("\n")
        yield f"log: {record.get('log')}"
    else:
        yield from _end_of(str(record.get("log")))


def _end_of(log: str) -> Iterator[str]:
    lines = last_lines(Path(log), _LAST_LINES)
    yield f"{'the end of ' if lines else ''}log: {log}"
    yield from (f"  {line}" for line in lines)


def _records(run: RunDir, attempt: int) -> dict[int, dict[str, Any]]:
    """What the ranks that failed in the attempt have left."""
    found = {}
    for path in run.failure_files(attempt):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            found[int(record["rank"])] = record
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being written in this moment
    return found


def _host(record: dict[str, Any]) -> str:
    return str(record.get("node") or record.get("host"))


def _summary(record: dict[str, Any]) -> str:
    message = str(record.get("message") or "").split("\n", 1)[0]
    return f"{record.get('error')}: {message}" if message else str(record.get("error"))


def name_ranks(ranks: list[int]) -> str:
    """As in `rank 3` or `ranks 0-2, 5`."""
    runs = [
        [rank for _, rank in group] for _, group in groupby(enumerate(ranks), lambda item: item[1] - item[0])
    ]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
