"""Error reports on runs: per failed attempt, the full cause and a summary of the other errors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from hpctrain.record_types import Event, FailureRecord, read_record
from hpctrain.records.crash_output import fold, useful_lines
from hpctrain.records.log_tail import output_range, read_last_lines
from hpctrain.rundir import RunDir
from hpctrain.text import format_ranks

#: Lines of the log to show if a rank exited without a traceback.
_LAST_LINES = 20
#: Lines of the log in which these are searched: crash handlers print long native stacks.
_SEARCHED_LINES = 500


def failures_since_submission(events: Iterable[Event]) -> list[Event]:
    """Return the failures in these events since the user's last submission, oldest first."""
    failures: list[Event] = []
    for event in events:
        if event.is_new_submission:
            failures.clear()
        elif event.kind == "failure":
            failures.append(event)
    return failures


def failures_of_attempt(events: Iterable[Event], attempt: int) -> list[Event]:
    """Return the failures of an attempt of any submission, oldest first."""
    return [event for event in events if event.kind == "failure" and event.attempt == attempt]


def report_failure(run: RunDir, failure: Event, ranks: Collection[int] = ()) -> Iterator[str]:
    yield f"attempt {failure.attempt}: {failure.cause}"
    yield from details(run, failure, ranks)


def details(run: RunDir, failure: Event, ranks: Collection[int] = ()) -> Iterator[str]:
    """Yield the traceback of the rank that failed first, and one line per error that followed."""
    records = _records(run, failure.attempt)
    in_full = [rank for rank in sorted(records) if rank in (ranks or (failure.rank,))]
    for rank in in_full:
        if ranks:
            record = records[rank]
            yield f"rank {rank} on {record.node or record.host}: {_summary(record)}"
        yield from _details(run, failure.attempt, records[rank])
    if not in_full and not ranks and failure.log:
        yield from _end_of(run, failure.attempt, failure.log)
    if not ranks:
        summaries = {rank: _summary(record) for rank, record in records.items() if rank not in in_full}
        for summary, group in groupby(
            sorted(summaries, key=lambda rank: (summaries[rank], rank)), summaries.__getitem__
        ):
            yield f"also {format_ranks(list(group))}: {summary}"


def rank_traceback(run: RunDir, failure: Event) -> list[str]:
    """Return the traceback of the rank that failed first, as lines; empty if there is none."""
    record = _records(run, failure.attempt).get(-1 if failure.rank is None else failure.rank)
    return fold(record.traceback).rstrip().splitlines() if record is not None else []


def job_log_tail(log: str | None) -> list[str]:
    """Return the end of the log of the batch script if `log` is that file, otherwise nothing."""
    if log is None or Path(log).name != RunDir(Path()).slurm_log.name:
        return []
    return read_last_lines(Path(log), _LAST_LINES)


def crashed_log_tail(run: RunDir, attempt: int) -> list[str]:
    """Return the end of the first log of a rank that shows a crash, for a run without failure records."""
    for _, log in run.rank_logs(attempt).values():
        if any("Traceback (most recent" in line for line in read_last_lines(log, _SEARCHED_LINES)):
            return list(_end_of(run, attempt, str(log)))
    return []


def _details(run: RunDir, attempt: int, record: FailureRecord) -> Iterator[str]:
    if record.traceback:
        yield from fold(record.traceback).rstrip().split("\n")
        yield f"log: {record.log}"
    else:
        yield from _end_of(run, attempt, record.log)


def _end_of(run: RunDir, attempt: int, log: str) -> Iterator[str]:
    is_rank_log = Path(log).name == run.rank_log(attempt, 0).name
    within = output_range(run, attempt) if is_rank_log else (0, None)
    lines = useful_lines(read_last_lines(Path(log), _SEARCHED_LINES, within=within))[-_LAST_LINES:]
    yield f"last lines of {log}:" if lines else f"log: {log}"
    yield from (f"  {line}" for line in lines)


def _records(run: RunDir, attempt: int) -> dict[int, FailureRecord]:
    records = {}
    for path in run.failure_files(attempt):
        with suppress(OSError, ValueError):
            record = read_record(path, FailureRecord)
            records[record.rank] = record
    return records


def _summary(record: FailureRecord) -> str:
    message = record.message.split("\n", 1)[0]
    return f"{record.error}: {message}" if message else record.error
