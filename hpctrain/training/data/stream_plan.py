"""Plan of the next steps of a stream, based on the available shard lengths."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch

from hpctrain.errors import UserError
from hpctrain.training.data.step_source import StopCondition
from hpctrain.training.data.stream_order import UNKNOWN_LENGTH, StreamBatch, StreamCursor, next_batch

#: Number of steps planned in advance.
_AHEAD = 2


class StreamPlan:
    """Plan of the next steps, equal on all ranks: only shard ends received by all ranks are used.

    Attributes:
        cursor: position after the last step taken.
        upcoming: batches of the next steps.
    """

    def __init__(self, num_shards: int, global_batch_size: int, until: StopCondition) -> None:
        self._num_shards, self._global_batch_size, self._until = num_shards, global_batch_size, until
        self._lengths: dict[int, torch.Tensor] = {}
        self.cursor = StreamCursor()
        self.upcoming: deque[StreamBatch] = deque()

    def lengths_in(self, epoch: int) -> torch.Tensor:
        """Return the length of each shard in an epoch; `UNKNOWN_LENGTH` if its end has not been reached."""
        if epoch not in self._lengths:
            self._lengths[epoch] = torch.full((self._num_shards,), UNKNOWN_LENGTH)
        return self._lengths[epoch]

    def reset(self, cursor: StreamCursor, lengths: torch.Tensor | None = None) -> None:
        """Start at a position, with the available shard lengths of its epoch."""
        self.cursor = cursor
        self.upcoming.clear()
        self._lengths = {} if lengths is None else {cursor.epoch: lengths}

    def plan(self, step: int) -> None:
        """Plan the steps after `step`.

        Raises:
            UserError: an epoch has no sample.
        """
        while len(self.upcoming) < _AHEAD:
            if self._until.steps is not None and step + len(self.upcoming) >= self._until.steps:
                return
            batch = self._compose(self.upcoming[-1].after if self.upcoming else self.cursor)
            if batch is None:
                return
            self.upcoming.append(batch)

    def pop_next(self) -> StreamBatch:
        """Remove and return the batch of the next step for training."""
        batch = self.upcoming.popleft()
        self.cursor = batch.after
        if batch.batch_idx == 0:
            self._lengths = {epoch: of for epoch, of in self._lengths.items() if epoch >= batch.epoch}
        return batch

    def add_ends(self, ends: Mapping[tuple[int, int], int]) -> None:
        """Receive ends of shards, by (epoch, shard), and discard the plan."""
        for (epoch, shard), length in ends.items():
            self.lengths_in(epoch)[shard] = length
        self.upcoming.clear()

    def _compose(self, cursor: StreamCursor) -> StreamBatch | None:
        """Return the batch from `cursor`, based on available lengths; None if training has ended."""
        while self._until.epochs is None or cursor.epoch < self._until.epochs:
            batch = next_batch(self.lengths_in(cursor.epoch), cursor, self._global_batch_size)
            if batch is not None:
                return batch
            if cursor.batch == 0:
                raise UserError(f"train_dataset yielded no samples in epoch {cursor.epoch}.")
            cursor = StreamCursor(cursor.epoch + 1)
        return None
