"""Read the logs and events of a run across attempts, and follow them as they are written."""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.jobs.runs.error_report import details, report_failure
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.jobs.runs.status_poller import StatusPoller, UnknownStateTracker
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.record_types import Event, LogLength
from hpctrain.records.log_tail import FileTail, RecordTail, output_range, read_last_records
from hpctrain.rundir import RunDir
from hpctrain.slurm.job_array import JobArray
from hpctrain.slurm.states import RunState
from hpctrain.telemetry.startup_parts import describe_staging, describe_startup

_POLL_S = 0.2
#: Tasks of a job array per poll: reading thousands at once would overload the file system.
_TASKS_PER_POLL = 64
#: Logs per poll: a run of thousands of ranks must not overload the file system.
_LOGS_PER_POLL = 64
#: Bytes that are read at once: after a lost connection, an incomplete piece is sent again.
_PIECE_BYTES = 32 * 1024
#: Seconds between two searches for ranks with a new log.
_LISTING_INTERVAL_S = 1.0


class RankLogReader:
    """Reader of the logs of an attempt's ranks, merged into one stream.

    Lines of one rank keep their order. Existing lines of different ranks are ordered by time, which the ranks
    record once a second. New lines are in order of arrival.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        ranks: Collection[int] = (),
        label: str = "",
        offsets: Mapping[int, int] | None = None,
    ) -> None:
        self.mark: tuple[int, int] | None = None
        """Number of the log yielded last, as in `RunDir.rank_logs`, and the position after it, in bytes."""
        self._offsets = offsets or {}
        self._run, self._attempt, self._label = run, attempt, label
        self._wanted = frozenset(ranks)
        self._tails: dict[int, FileTail] = {}
        self._logs: dict[int, tuple[int, Path]] = {}
        #: Files of the ranks of a batch script; those of a node, for example, may share one.
        self._targets: set[str] = set()
        self._queue: deque[int] = deque()
        self._partial_lines: dict[int, str] = {}
        self._next_listing = 0.0
        self._labels_ranks, self._width = False, 0

    def read_past(self) -> Iterator[str]:
        self._find_ranks()
        for _, number, size in heapq.merge(*map(_notes, self._run.all_log_indexes(self._attempt))):
            if (tail := self._tails.get(number)) is not None:
                yield from self._read(number, tail, size)
        # Lines written after the last time record of a rank.
        for number, tail in sorted(self._tails.items(), key=lambda item: (item[1].modified(), item[0])):
            yield from self._read(number, tail)

    def read_new(self) -> Iterator[str]:
        """Yield the lines since the last poll; with many ranks, each poll reads the next part of them."""
        if time.monotonic() >= self._next_listing:
            self._find_ranks()
        for _ in range(min(_LOGS_PER_POLL, len(self._queue))):
            number = self._queue.popleft()
            self._queue.append(number)
            if self._tails[number].has_grown():
                yield from self._read(number, self._tails[number])

    def read_rest(self) -> Iterator[str]:
        """Yield all remaining lines, including unterminated ones."""
        self._find_ranks()
        for number, tail in sorted(self._tails.items()):
            # The length from `stat` may be outdated on NFS.
            yield from self._read(number, tail)
            if torn := self._partial_lines.pop(number, ""):
                self.mark = number, tail.position
                yield self._line(number, torn)

    def _find_ranks(self) -> None:
        self._next_listing = time.monotonic() + _LISTING_INTERVAL_S
        logs = self._run.rank_logs(self._attempt)
        for number, (rank, log) in logs.items():
            if number in self._logs or (self._wanted and rank not in self._wanted):
                continue
            self._logs[number] = rank, log
            if log != self._run.rank_log(self._attempt, rank):
                if (target := os.path.realpath(log)) in self._targets:
                    continue
                self._targets.add(target)
            begin, _ = output_range(self._run, self._attempt, number, log)
            self._tails[number] = FileTail(log, self._offsets.get(number, begin))
            self._queue.append(number)
        if self._tails and not self._width:
            world_size = _world_size(self._run, self._attempt) or len(self._tails)
            # A single rank needs no prefix.
            self._labels_ranks = len(self._wanted) != 1 and world_size > 1
            self._width = len(str(max(world_size - 1, *self._tails)))
        if self._targets:
            self._labels_ranks = len(self._wanted) != 1
            self._width = len(str(max(rank for rank, _ in self._logs.values())))

    def _read(self, number: int, tail: FileTail, size: int | None = None) -> Iterator[str]:
        _, end = output_range(self._run, self._attempt, number, self._logs[number][1])
        size = end if size is None else size
        while text := tail.read(size, most_bytes=_PIECE_BYTES):
            if not self._labels_ranks and not self._label:
                self.mark = number, tail.position
                yield text
                continue
            *lines, torn = (self._partial_lines.pop(number, "") + text).split("\n")
            if lines:
                self.mark = number, tail.line_start
                yield "".join([self._line(number, line) for line in lines])
            if torn:
                self._partial_lines[number] = _last_state(torn)

    def _line(self, number: int, line: str) -> str:
        # For a line that overwrites itself (progress bars), show the final state, as a terminal does.
        shown = _last_state(line).rstrip("\r")
        is_of_rank = self._labels_ranks and not (self._targets and number == 0)
        origin = f"[{self._logs[number][0]:>{self._width}}] " if is_of_rank else ""
        return f"{self._label}{origin}{shown}\n"


def _last_state(line: str) -> str:
    """Return the part of a line that a terminal still shows, such as the newest state of a progress bar."""
    shown = line.rstrip("\r")
    return shown.rpartition("\r")[2] + "\r" * (len(line) > len(shown))


def _notes(path: Path) -> Iterator[tuple[float, int, int]]:
    for note in RecordTail(path, LogLength).read_in_parts():
        yield note.time, note.rank, note.num_bytes


def _world_size(run: RunDir, attempt: int) -> int:
    for event in read_last_records(run.events, Event, whole=True):
        if event.kind == "started" and event.attempt == attempt:
            return event.world_size or 0
    return 0


class LogMark(NamedTuple):
    """Position after an item: a reader that starts there continues without losing or repeating lines."""

    source: str
    """Label of the task in a job array, otherwise empty."""
    attempt: int | None
    """Attempt of the logs; None for an event."""
    rank: int | None
    """Number of the log that was read (see `RunDir.rank_logs`); None for an event."""
    offset: int
    """Bytes of the log, or number of events."""


@dataclass
class LogPosition:
    """Sum of the marks of one source."""

    attempt: int | None = None
    events: int = 0
    offsets: dict[int, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> LogPosition:
        offsets = {int(rank): offset for rank, offset in record["offsets"].items()}
        return cls(record["attempt"], record["events"], offsets)

    def advance(self, mark: LogMark) -> None:
        if mark.attempt not in (None, self.attempt):
            self.attempt, self.offsets = mark.attempt, {}
        if mark.rank is None:
            self.events = mark.offset
        else:
            self.offsets[mark.rank] = mark.offset


@dataclass(frozen=True)
class LogText:
    """A piece of the logs; complete, labelled lines if several logs are shown."""

    text: str
    mark: LogMark | None = None


@dataclass(frozen=True)
class EventLine:
    """A line about the run."""

    line: str
    details: tuple[str, ...] = ()
    """Details of the failure that the event reports."""
    mark: LogMark | None = None


@dataclass(frozen=True)
class LogFilter:
    ranks: Collection[int] = ()
    """Ranks to show; empty means all."""
    attempt: int | None = None
    """Attempt to show; None shows all attempts in order."""
    errors: bool = False
    """Show a report on each failure instead of the logs."""


class RunLogReader:
    """Incremental reader of a run's output, of all ranks across attempts."""

    def __init__(
        self,
        run: RunDir,
        shown: LogFilter,
        *,
        whole: bool,
        label: str = "",
        position: LogPosition | None = None,
    ) -> None:
        """Prepare the reader, which continues at `position`; nothing is read yet."""
        self._run, self._shown, self._whole, self._label = run, shown, whole, label
        self._position, self._num_events = position, 0
        self._events = RecordTail(run.events, Event)
        self._first_attempt: int | None = None
        self._attempt: int | None = None
        self._rank_logs: RankLogReader | None = None
        self._new_events: list[Event] = []
        self._announced_events: list[Event] = []

    @property
    def has_new_events(self) -> bool:
        """True if the last `read` found events that are not yet yielded."""
        return bool(self._new_events)

    def read(self) -> Iterator[LogText | EventLine | LogMark]:
        """Yield the start, then new log output, then the events that the previous call found."""
        if self._first_attempt is None:
            self._first_attempt = self._start()
            yield LogMark(self._label, self._first_attempt, None, self._num_events)
        yield from self._reports() if self._shown.errors else self._read_logs(self._first_attempt)
        for event in self._announced_events:
            self._num_events += 1
            if line := describe_event(event):
                mark = LogMark(self._label, None, None, self._num_events)
                yield EventLine(f"{self._label}{line}", self._details(event), mark)
        self._announced_events = self._new_events = self._events.read()

    def read_rest(self) -> Iterator[LogText]:
        """Yield the remaining logs of an ended run, including unterminated lines."""
        if self._rank_logs is not None:
            yield from self._marked(self._rank_logs.read_rest())

    def _start(self) -> int:
        """Read the existing events, and return the first attempt to show."""
        past = list(self._events.read_in_parts())
        start = max((i for i, event in enumerate(past) if event.is_new_submission), default=-1) + 1
        if self._shown.attempt is not None:
            start = 0  # The attempt may belong to an earlier submission.
        attempt = past[start - 1].attempt if self._whole and start else None
        announces = self._whole
        if self._position is not None:
            start, attempt, announces = self._position.events, self._position.attempt, True
        self._new_events = past[start:]
        self._announced_events = self._new_events if announces else []
        self._num_events = start if announces else len(past)
        if self._shown.attempt is not None:
            return self._shown.attempt
        return max(self._run.attempts(), default=0) if attempt is None else attempt

    def _read_logs(self, first_attempt: int) -> Iterator[LogText]:
        """Yield new output; the rest of an older attempt precedes the next attempt."""
        for attempt in self._run.attempts():
            newest = first_attempt - 1 if self._attempt is None else self._attempt
            if attempt > newest and self._shown.attempt in (None, attempt):
                yield from self.read_rest()
                position = self._position if attempt == first_attempt else None
                offsets = position.offsets if position is not None else {}
                self._rank_logs = RankLogReader(self._run, attempt, self._shown.ranks, self._label, offsets)
                self._attempt = attempt
                yield from self._marked(self._rank_logs.read_past())
        if self._rank_logs is not None:
            yield from self._marked(self._rank_logs.read_new())

    def _marked(self, texts: Iterator[str]) -> Iterator[LogText]:
        for text in texts:
            mark = self._rank_logs and self._rank_logs.mark
            yield LogText(text, LogMark(self._label, self._attempt, *mark) if mark else None)

    def _details(self, event: Event) -> tuple[str, ...]:
        if event.kind != "failure" or self._shown.errors:
            return ()
        lines = details(self._run, event)
        is_shown = not self._shown.ranks or event.rank in self._shown.ranks
        return tuple(line for line in lines if not is_shown or line.startswith("also "))

    def _reports(self) -> Iterator[LogText]:
        for event in self._new_events:
            if event.kind == "failure" and self._shown.attempt in (None, event.attempt):
                lines = report_failure(self._run, event, self._shown.ranks)
                yield LogText("".join(f"{self._label}{line}\n" for line in lines))


#: All logs of all ranks.
ALL_RANKS = LogFilter()


def follow_run(
    run: Run, shown: LogFilter = ALL_RANKS, *, whole: bool, positions: Mapping[str, LogPosition] | None = None
) -> Iterator[LogText | EventLine | LogMark | RunStatus]:
    """Yield logs and events of the run as they are written; the last item is the status of the ended run."""
    readers = deque(_open_readers(run, shown, whole=whole, positions=positions or {}))
    poller, unknown = StatusPoller([run.dir], run.environ), UnknownStateTracker()
    before: RunStatus | None = None
    while True:
        # Query before reading, so that no output before the end is missed.
        status = poller.poll()[0] if poller.is_due else None
        has_ended = status is not None and status.state.ended
        for _ in range(len(readers) if has_ended else min(_TASKS_PER_POLL, len(readers))):
            yield from readers[0].read()
            readers.rotate(-1)
        if status is not None:
            yield from _notices(status, before, unknown)
            before = status
        if status is not None and has_ended and not any(reader.has_new_events for reader in readers):
            for reader in readers:
                yield from reader.read_rest()
            run.await_exit()
            yield status
            return
        time.sleep(_POLL_S)


def _open_readers(
    run: Run, shown: LogFilter, *, whole: bool, positions: Mapping[str, LogPosition]
) -> list[RunLogReader]:
    """Return a reader for the run, or for each task of a job array; `whole` takes those last submitted."""
    tasks: Sequence[int] = run.dir.tasks()
    if not tasks:
        return [RunLogReader(run.dir, shown, whole=whole, position=positions.get(""))]
    if whole:
        # An array resubmitted with other tasks still contains the folders of the earlier tasks.
        tasks = JobArray.parse(load_spec(run.dir.spec).array or "").indices
    width = len(f"[task-{max(tasks)}]")
    labels = {index: f"{f'[task-{index}]':<{width}} " for index in tasks}
    return [
        RunLogReader(run.dir.task(index), shown, whole=whole, label=label, position=positions.get(label))
        for index, label in labels.items()
    ]


def _notices(
    status: RunStatus, before: RunStatus | None, unknown: UnknownStateTracker
) -> Iterator[EventLine]:
    """Yield a line if the state changed or became unknown."""
    if message := unknown.message_for(status):
        yield EventLine(message)
    is_array = status.tasks is not None
    is_new = before is None or before.state is not status.state or (is_array and before.words != status.words)
    if is_new and (is_array or status.state is RunState.PENDING):
        yield EventLine(f"job is {status.state}" + (f" ({status.words})" if status.words else ""))


def describe_event(event: Event) -> str | None:
    """Describe the event in one line; None if it is not shown."""
    text = _describe_kind(event)
    return None if text is None else f"attempt {event.attempt}{text}"


def _describe_kind(event: Event) -> str | None:
    match event.kind:
        case "started":
            over = f"; {event.note or 'no known checkpoint'}" if event.starts_over else ""
            size = "" if event.world_size is None else f", world size {event.world_size}"
            return f": starting{size}, nodes {event.nodes}{over}"
        case "staged":
            return f": {describe_staging(event)}"
        case "startup":
            return f": {describe_startup(event.duration_s, event.parts)}"
        case "resumed":
            damaged = "".join(f"; {sentence}" for sentence in event.broken or ())
            return f": resumed after step {event.step}{damaged}"
        case "bad_loss":
            return f": {event.cause}; action: {event.action}"
        case "signal":
            saved = "checkpoint saved" if event.saved else "no new checkpoint was saved"
            return f": stopped by {event.signal} after step {event.step}; {saved}"
        case "failure":
            log = f" (log: {event.log})" if event.log else ""
            return f": failure: {event.cause}{log}"
        case "restart":
            note = f"; {event.note}" if event.note else ""
            return f" failed; restarting{note}"
        case "shrink":
            return f": continuing on {event.nodes} of {event.nodes_before} nodes ({event.cause})"
        case "requeue" if event.by == "successor":
            return ": a successor job will continue the run"
        case "submitted" if event.after is not None:
            return f": job {event.job_id} continues the run after job {event.after}"
        case "requeue" if event.cause:
            return f": {event.cause}"
        case "requeue":
            memory = f" with --{event.memory}" if event.memory else ""
            return f": requeueing the job{memory}"
        case "finished" if event.note:
            gives_up = "giving up: " if event.state == "FAILED" else ""
            return f": {gives_up}{event.note}"
    return None
