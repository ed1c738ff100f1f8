"""Logs of an attempt's ranks, merged into one stream.

Lines of one rank keep their order. Existing lines of different ranks are ordered by time, which the ranks
record once a second. New lines are in order of arrival.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from hpctrain.records.log_tail import FileTail, RecordTail, read_last_records
from hpctrain.rundir import RunDir
from hpctrain.schema import Event, LogLength

#: Logs per poll: a run of thousands of ranks must not overload the file system.
_LOGS_PER_POLL = 64
#: Bytes that are read at once: after a lost connection, an incomplete piece is sent again.
_PIECE_BYTES = 32 * 1024
#: Seconds between two searches for ranks with a new log.
_LISTING_INTERVAL_S = 1.0


class RankLogReader:
    def __init__(
        self,
        run: RunDir,
        attempt: int,
        ranks: Collection[int] = (),
        label: str = "",
        offsets: Mapping[int, int] | None = None,
    ) -> None:
        self.mark: tuple[int, int] | None = None
        """Rank of the text yielded last, and the position after this text in its log, in bytes."""
        self._offsets = offsets or {}
        self._run, self._attempt, self._label = run, attempt, label
        self._wanted = frozenset(ranks)
        self._tails: dict[int, FileTail] = {}
        self._queue: deque[int] = deque()
        self._partial_lines: dict[int, str] = {}
        self._next_listing = 0.0
        self._labels_ranks, self._width = False, 0

    def read_past(self) -> Iterator[str]:
        self._find_ranks()
        for _, rank, size in heapq.merge(*map(_notes, self._run.all_log_indexes(self._attempt))):
            if (tail := self._tails.get(rank)) is not None:
                yield from self._read(rank, tail, size)
        # Lines written after the last time record of a rank.
        for rank, tail in sorted(self._tails.items(), key=lambda item: (item[1].modified(), item[0])):
            yield from self._read(rank, tail)

    def read_new(self) -> Iterator[str]:
        """Yield the lines since the last poll; with many ranks, each poll reads the next part of them."""
        if time.monotonic() >= self._next_listing:
            self._find_ranks()
        for _ in range(min(_LOGS_PER_POLL, len(self._queue))):
            rank = self._queue.popleft()
            self._queue.append(rank)
            if self._tails[rank].has_grown():
                yield from self._read(rank, self._tails[rank])

    def read_rest(self) -> Iterator[str]:
        """Yield all remaining lines, including unterminated ones."""
        self._find_ranks()
        for rank, tail in sorted(self._tails.items()):
            # The length from `stat` may be outdated on NFS.
            yield from self._read(rank, tail)
            if torn := self._partial_lines.pop(rank, ""):
                self.mark = rank, tail.position
                yield self._line(rank, torn)

    def _find_ranks(self) -> None:
        self._next_listing = time.monotonic() + _LISTING_INTERVAL_S
        for rank in self._run.ranks(self._attempt):
            if rank not in self._tails and (not self._wanted or rank in self._wanted):
                self._tails[rank] = FileTail(
                    self._run.rank_log(self._attempt, rank), self._offsets.get(rank, 0)
                )
                self._queue.append(rank)
        if self._tails and not self._width:
            world_size = _world_size(self._run, self._attempt) or len(self._tails)
            # A single rank needs no prefix.
            self._labels_ranks = len(self._wanted) != 1 and world_size > 1
            self._width = len(str(max(world_size - 1, *self._tails)))

    def _read(self, rank: int, tail: FileTail, size: int | None = None) -> Iterator[str]:
        while text := tail.read(size, most_bytes=_PIECE_BYTES):
            if not self._labels_ranks and not self._label:
                self.mark = rank, tail.position
                yield text
                continue
            *lines, torn = (self._partial_lines.pop(rank, "") + text).split("\n")
            if lines:
                self.mark = rank, tail.line_start
                yield "".join([self._line(rank, line) for line in lines])
            if torn:
                self._partial_lines[rank] = _last_state(torn)

    def _line(self, rank: int, line: str) -> str:
        # For a line that overwrites itself (progress bars), show the final state, as a terminal does.
        shown = _last_state(line).rstrip("\r")
        origin = f"[{rank:>{self._width}}] " if self._labels_ranks else ""
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
