"""Buffers for samples that a rank has read but not yet trained, with checkpoints for resuming."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hpctrain.training.data.interleaved_reader import ReaderCheckpoint, ShardChunk
from hpctrain.training.data.shard_readers import ShardReaders
from hpctrain.training.data.stream_order import UNKNOWN_LENGTH


class _Shelf:
    """Samples of one shard and epoch that are read but not yet trained."""

    def __init__(self, mark: ReaderCheckpoint | None, length: int | None = None) -> None:
        self.samples: dict[int, Any] = {}
        self.read = mark.number if mark is not None else 0
        self.length = length
        self._marks: deque[ReaderCheckpoint] = deque([mark] if mark is not None else [])

    def put(self, chunk: ShardChunk) -> None:
        self.samples.update(chunk.samples)
        self.read = chunk.stop
        if chunk.mark is not None:
            self._marks.append(chunk.mark)
        if chunk.ended:
            self.length = chunk.stop

    def mark_before(self, number: int) -> ReaderCheckpoint | None:
        """Return the last checkpoint at or before sample `number`; drop earlier checkpoints."""
        while len(self._marks) > 1 and self._marks[1].number <= number:
            self._marks.popleft()
        return self._marks[0] if self._marks else None


class ShardBuffers:
    """Buffers of this rank's shards, one for each shard and epoch."""

    def __init__(
        self,
        own: Sequence[int],
        lengths_in: Callable[[int], torch.Tensor],
        open_lanes: Callable[[], ShardReaders],
    ) -> None:
        """Create empty buffers.

        Args:
            own: shards of this rank.
            lengths_in: returns the length of each shard in an epoch; `UNKNOWN_LENGTH` if not known.
            open_lanes: opens the shards at the first read.
        """
        self._own, self._lengths_in, self._open_lanes = own, lengths_in, open_lanes
        self._shelves: dict[tuple[int, int], _Shelf] = {}
        self._lanes: ShardReaders | None = None

    def begin(self, epoch: int, marks: Mapping[int, ReaderCheckpoint | None]) -> None:
        """Begin at these checkpoints, by default at the beginning; None skips a shard that has ended."""
        for shard in self._own:
            if (mark := marks.get(shard, ReaderCheckpoint())) is not None:
                self._shelves[epoch, shard] = _Shelf(mark)

    def read(self, epoch: int, shard: int, until: int) -> int | None:
        """Read a shard up to sample `until`; return its length if it is known by then."""
        shelf = self._shelf(epoch, shard)
        while shelf.length is None and shelf.read < until:
            self._lanes = self._lanes or self._open_lanes()
            chunk = self._lanes.next_chunk(shard)
            self._shelf(chunk.epoch, chunk.shard).put(chunk)
        return shelf.length

    def take(self, epoch: int, shard: int, number: int) -> Any:
        """Remove and return a sample, to train it."""
        return self._shelves[epoch, shard].samples.pop(number)

    def samples(self) -> Iterator[Any]:
        """Yield all samples that are not yet trained."""
        for shelf in self._shelves.values():
            yield from shelf.samples.values()

    def marks(self, epoch: int, taken: Sequence[int]) -> dict[int, ReaderCheckpoint | None]:
        """Return the checkpoint of each shard to resume from after `taken[shard]` trained samples."""
        return {
            shard: self._shelves[epoch, shard].mark_before(taken[shard])
            for shard in self._own
            if (epoch, shard) in self._shelves
        }

    def forget(self, epoch: int, taken: Sequence[int]) -> None:
        """Drop checkpoints that are no longer needed after `taken[shard]` trained samples."""
        for shard in self._own:
            self._shelf(epoch, shard).mark_before(taken[shard])

    def forget_before(self, epoch: int) -> None:
        """Drop earlier epochs."""
        self._shelves = {key: shelf for key, shelf in self._shelves.items() if key[0] >= epoch}

    def close(self) -> None:
        """Stop the data workers."""
        if self._lanes is not None:
            self._lanes.close()

    def _shelf(self, epoch: int, shard: int) -> _Shelf:
        if (epoch, shard) not in self._shelves:
            length = int(self._lengths_in(epoch)[shard])
            self._shelves[epoch, shard] = _Shelf(None, length if length < UNKNOWN_LENGTH else None)
        return self._shelves[epoch, shard]
