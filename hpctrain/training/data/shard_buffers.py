"""Buffers for samples that are read but not yet trained, with checkpoints for resuming."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hpctrain.training.data.interleaved_reader import ReaderCheckpoint, ShardChunk
from hpctrain.training.data.shard_readers import ShardReaders
from hpctrain.training.data.stream_order import UNKNOWN_LENGTH


class _ShardBuffer:
    """Samples of one shard and epoch that are read but not yet trained."""

    def __init__(self, checkpoint: ReaderCheckpoint | None, length: int | None = None) -> None:
        self.samples: dict[int, Any] = {}
        self.read = checkpoint.number if checkpoint is not None else 0
        self.length = length
        self._marks: deque[ReaderCheckpoint] = deque([checkpoint] if checkpoint is not None else [])

    def put(self, chunk: ShardChunk) -> None:
        self.samples.update(chunk.samples)
        self.read = chunk.stop
        if chunk.checkpoint is not None:
            self._marks.append(chunk.checkpoint)
        if chunk.ended:
            self.length = chunk.stop

    def mark_before(self, number: int) -> ReaderCheckpoint | None:
        """Return the last checkpoint at or before sample `number`; drop earlier checkpoints."""
        while len(self._marks) > 1 and self._marks[1].number <= number:
            self._marks.popleft()
        return self._marks[0] if self._marks else None


class ShardBuffers:
    """Buffers of this rank's shards: a buffer for each shard and epoch."""

    def __init__(
        self,
        own: Sequence[int],
        lengths_in: Callable[[int], torch.Tensor],
        open_readers: Callable[[], ShardReaders],
    ) -> None:
        """Create empty buffers.

        Args:
            own: shards of this rank.
            lengths_in: returns the length of each shard in an epoch; `UNKNOWN_LENGTH` if unknown.
            open_readers: opens the shards at the first read.
        """
        self._own, self._lengths_in, self._open_readers = own, lengths_in, open_readers
        self._buffers: dict[tuple[int, int], _ShardBuffer] = {}
        self._readers: ShardReaders | None = None

    def reset(self, epoch: int, checkpoints: Mapping[int, ReaderCheckpoint | None]) -> None:
        """Start at these checkpoints, by default at the beginning; None skips an ended shard."""
        for shard in self._own:
            if (checkpoint := checkpoints.get(shard, ReaderCheckpoint())) is not None:
                self._buffers[epoch, shard] = _ShardBuffer(checkpoint)

    def read(self, epoch: int, shard: int, until: int) -> int | None:
        """Read a shard up to sample `until`; return its length if the end was reached."""
        buffer = self._buffer(epoch, shard)
        while buffer.length is None and buffer.read < until:
            self._readers = self._readers or self._open_readers()
            chunk = self._readers.next_chunk(shard)
            self._buffer(chunk.epoch, chunk.shard).put(chunk)
        return buffer.length

    def pop(self, epoch: int, shard: int, number: int) -> Any:
        """Remove and return a sample for training."""
        return self._buffers[epoch, shard].samples.pop(number)

    def samples(self) -> Iterator[Any]:
        """Yield all samples that are not yet trained."""
        for buffer in self._buffers.values():
            yield from buffer.samples.values()

    def checkpoints(self, epoch: int, taken: Sequence[int]) -> dict[int, ReaderCheckpoint | None]:
        """Return the checkpoint of each shard for a resume after `taken[shard]` trained samples."""
        return {
            shard: self._buffers[epoch, shard].mark_before(taken[shard])
            for shard in self._own
            if (epoch, shard) in self._buffers
        }

    def forget(self, epoch: int, taken: Sequence[int]) -> None:
        """Drop checkpoints that are no longer needed after `taken[shard]` trained samples."""
        for shard in self._own:
            self._buffer(epoch, shard).mark_before(taken[shard])

    def forget_before(self, epoch: int) -> None:
        """Drop earlier epochs."""
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[0] >= epoch}

    def close(self) -> None:
        """Stop the data workers, and empty the buffers."""
        if self._readers is not None:
            self._readers.close()
        self._readers = None
        self._buffers.clear()

    def _buffer(self, epoch: int, shard: int) -> _ShardBuffer:
        if (epoch, shard) not in self._buffers:
            length = int(self._lengths_in(epoch)[shard])
            self._buffers[epoch, shard] = _ShardBuffer(None, length if length < UNKNOWN_LENGTH else None)
        return self._buffers[epoch, shard]
