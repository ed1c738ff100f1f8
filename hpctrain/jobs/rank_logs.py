"""The logs of an attempt's ranks, several of them as one text.

The lines of one rank always come in the order in which it printed them. Among ranks, what is there already
comes in the order of time, which the ranks note once a second, and what comes while we look in that of its
arrival.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from hpctrain.jobs.tail import RecordTail, Tail, last_records
from hpctrain.rundir import RunDir

#: Logs that one look goes through: a run of thousands of ranks must not keep the file system busy.
_LOGS_A_LOOK = 64
#: Seconds between two looks for ranks that have begun a log.
_RANKS_EVERY_S = 1.0


class RankLogs:
    """Reads on in the logs of one attempt."""

    def __init__(self, run: RunDir, attempt: int, ranks: Collection[int] = (), label: str = "") -> None:
        """Begin at the start of the logs.

        Args:
            run: the run.
            attempt: whose logs.
            ranks: the ranks that are wanted; none stands for all.
            label: what each line begins with, where several runs are shown as one text.
        """
        self._run, self._attempt, self._label = run, attempt, label
        self._wanted = frozenset(ranks)
        self._tails: dict[int, Tail] = {}
        self._queue: deque[int] = deque()
        self._torn: dict[int, str] = {}
        self._next_listing = 0.0
        self._tells_ranks, self._width = False, 0

    def read_past(self) -> Iterator[str]:
        """Yield what is there now, in the order of time."""
        self._find_ranks()
        for _, rank, size in heapq.merge(*map(_notes, self._run.all_log_times(self._attempt))):
            if (tail := self._tails.get(rank)) is not None:
                yield from self._read(rank, tail, size)
        # What came after the last note of a rank.
        for rank, tail in sorted(self._tails.items(), key=lambda item: (item[1].modified(), item[0])):
            yield from self._read(rank, tail)

    def read_new(self) -> Iterator[str]:
        """Yield what has come since the last look; of many ranks, a look takes a part in turn."""
        if time.monotonic() >= self._next_listing:
            self._find_ranks()
        for _ in range(min(_LOGS_A_LOOK, len(self._queue))):
            rank = self._queue.popleft()
            self._queue.append(rank)
            if self._tails[rank].has_grown():
                yield from self._read(rank, self._tails[rank])

    def read_rest(self) -> Iterator[str]:
        """Yield all that is left, lines without an end too."""
        self._find_ranks()
        for rank, tail in sorted(self._tails.items()):
            if tail.has_grown():
                yield from self._read(rank, tail)
            if torn := self._torn.pop(rank, ""):
                yield self._line(rank, torn)

    def _find_ranks(self) -> None:
        self._next_listing = time.monotonic() + _RANKS_EVERY_S
        for rank in self._run.ranks(self._attempt):
            if rank not in self._tails and (not self._wanted or rank in self._wanted):
                self._tails[rank] = Tail(self._run.rank_log(self._attempt, rank))
                self._queue.append(rank)
        if self._tails and not self._width:
            world_size = _world_size(self._run, self._attempt) or len(self._tails)
            # Before the lines of a single rank it would tell nothing.
            self._tells_ranks = len(self._wanted) != 1 and world_size > 1
            self._width = len(str(max(world_size - 1, *self._tails)))

    def _read(self, rank: int, tail: Tail, size: int | None = None) -> Iterator[str]:
        while text := tail.read(size):
            if not self._tells_ranks and not self._label:
                yield text
                continue
            *lines, torn = (self._torn.pop(rank, "") + text).split("\n")
            if lines:
                yield "".join([self._line(rank, line) for line in lines])
            if torn:
                self._torn[rank] = torn

    def _line(self, rank: int, line: str) -> str:
        # Of a line that overwrites itself, as progress bars do, a terminal shows the last state.
        shown = line.rstrip("\r").rpartition("\r")[2]
        origin = f"[{rank:>{self._width}}] " if self._tells_ranks else ""
        return f"{self._label}{origin}{shown}\n"


def _notes(path: Path) -> Iterator[tuple[float, int, int]]:
    """What the ranks of a node have noted: when whose log had which length."""
    for note in RecordTail(path).read_in_parts():
        with suppress(KeyError, TypeError, ValueError):
            yield float(note["time"]), int(note["rank"]), int(note["bytes"])


def _world_size(run: RunDir, attempt: int) -> int:
    """How many ranks were started in the attempt; 0 where that is not on record."""
    for event in last_records(run.events, whole=True):
        if event.get("kind") == "started" and event.get("attempt") == attempt:
            return int(event.get("world_size", 0))
    return 0
