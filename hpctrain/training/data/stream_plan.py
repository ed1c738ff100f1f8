"""Which samples the next steps of a stream train, as far as the lengths of its shards are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch

from hpctrain.errors import UserError
from hpctrain.training.data.feed import Until
from hpctrain.training.data.shards import ENDLESS, Cursor, StreamBatch, next_batch

#: Steps of which the ranks know the samples in advance.
_AHEAD = 2


class StreamPlan:
    """The next steps; the same on all ranks, for none plans with an end that the others do not know.

    Attributes:
        cursor: the position behind the step that was taken last.
        coming: the batches of the next steps.
    """

    def __init__(self, num_shards: int, global_batch_size: int, until: Until) -> None:
        self._num_shards, self._global_batch_size, self._until = num_shards, global_batch_size, until
        self._lengths: dict[int, torch.Tensor] = {}
        self.cursor = Cursor()
        self.coming: deque[StreamBatch] = deque()

    def lengths_in(self, epoch: int) -> torch.Tensor:
        """Of each shard the length in an epoch; `ENDLESS` where its end was not seen yet."""
        if epoch not in self._lengths:
            self._lengths[epoch] = torch.full((self._num_shards,), ENDLESS)
        return self._lengths[epoch]

    def begin_at(self, cursor: Cursor, lengths: torch.Tensor | None = None) -> None:
        """Go on from a position, in whose epoch these lengths are known."""
        self.cursor = cursor
        self._lengths = {} if lengths is None else {cursor.epoch: lengths}

    def plan(self, step: int) -> None:
        """Plan the steps after `step`.

        Raises:
            UserError: an epoch has no sample.
        """
        while len(self.coming) < _AHEAD:
            if self._until.steps is not None and step + len(self.coming) >= self._until.steps:
                return
            batch = self._compose(self.coming[-1].after if self.coming else self.cursor)
            if batch is None:
                return
            self.coming.append(batch)

    def take(self) -> StreamBatch:
        """The batch of the next step, which is being trained now."""
        batch = self.coming.popleft()
        self.cursor = batch.after
        if batch.batch_idx == 0:
            self._lengths = {epoch: of for epoch, of in self._lengths.items() if epoch >= batch.epoch}
        return batch

    def learn(self, ends: Mapping[tuple[int, int], int]) -> None:
        """Take in where shards end, by (epoch, shard); what was planned has to be planned anew."""
        for (epoch, shard), length in ends.items():
            self.lengths_in(epoch)[shard] = length
        self.coming.clear()

    def _compose(self, cursor: Cursor) -> StreamBatch | None:
        """The batch from `cursor` on, as far as lengths are known; None where the training has ended."""
        while self._until.epochs is None or cursor.epoch < self._until.epochs:
            batch = next_batch(self.lengths_in(cursor.epoch), cursor, self._global_batch_size)
            if batch is not None:
                return batch
            if cursor.batch == 0:
                raise UserError(f"train_dataset gave no sample in epoch {cursor.epoch}.")
            cursor = Cursor(cursor.epoch + 1)
        return None
