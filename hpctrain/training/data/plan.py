"""Which samples each rank trains in a step: a pure function of the step, for data sets with an index."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from hpctrain.training.data.order import SampleOrder


@dataclass(frozen=True)
class Deal:
    """How the samples of a batch are dealt to the ranks, seen from one of them."""

    rank: int
    world_size: int

    def part(self, count: int) -> tuple[int, int]:
        """The half-open range of a batch of `count` samples that is this rank's."""
        return split(count, self.rank, self.world_size)

    def largest(self, count: int) -> int:
        """Samples of the rank that gets most of a batch of `count`."""
        return -(-count // self.world_size)


class Share(NamedTuple):
    """One rank's part of one global batch."""

    step: int
    """The optimizer step that this batch belongs to; the first is 1."""
    epoch: int
    """The epoch that the batch lies in, from 0."""
    batch_idx: int
    """Number of the batch in its epoch, from 0."""
    batch_size: int
    """Samples of all ranks together."""
    largest: int
    """Samples of the rank that has most of them."""
    indices: torch.Tensor
    """Samples of this rank, as int64; empty where the batch has fewer samples than there are ranks.

    Shape [n]; for a stream [n, 2], each a shard and the number of the sample in it.
    """

    def parts(self, micro_batch_size: int | None) -> list[tuple[int, int]]:
        """This rank's samples in micro-batches: half-open ranges, as many on every rank, some maybe empty.

        Args:
            micro_batch_size: samples of a micro-batch at the most; None takes all at once.
        """
        if micro_batch_size is None:
            return [(0, len(self.indices))]
        count = -(-self.largest // micro_batch_size)
        return [split(len(self.indices), i, count) for i in range(count)]


@dataclass(frozen=True)
class BatchPlan:
    """The order in which a run consumes its data set: a pure function of the step, on any number of ranks.

    Step s lies in epoch (s - 1) // steps_per_epoch. The last batch of an epoch may be short; it is kept.
    """

    order: SampleOrder
    global_batch_size: int

    @cached_property
    def steps_per_epoch(self) -> int:
        return -(-self.order.num_samples // self.global_batch_size)

    def identity(self) -> dict[str, int]:
        """Everything that the order of samples depends on."""
        return {
            "seed": self.order.seed,
            "num_samples": self.order.num_samples,
            "global_batch_size": self.global_batch_size,
        }

    def share(self, step: int, deal: Deal) -> Share:
        """What a rank trains in `step` (counted from 1)."""
        epoch, batch = divmod(step - 1, self.steps_per_epoch)
        start, stop = self._range(batch)
        size = stop - start
        low, high = deal.part(size)
        indices = self.order.indices(epoch, start + low, start + high)
        return Share(step, epoch, batch, size, deal.largest(size), indices)

    def spare(self, step: int) -> torch.Tensor:
        """A sample of the batch, of shape [1], for a rank that has none of its own in `step`."""
        epoch, batch = divmod(step - 1, self.steps_per_epoch)
        start, _ = self._range(batch)
        return self.order.indices(epoch, start, start + 1)

    def _range(self, batch: int) -> tuple[int, int]:
        start = batch * self.global_batch_size
        return start, min(start + self.global_batch_size, self.order.num_samples)


def split(count: int, part: int, num_parts: int) -> tuple[int, int]:
    """The half-open range of `count` things that is the `part`-th of `num_parts` nearly equal ones.

    Sizes differ by one at the most, and part 0 is among the largest.
    """
    return -(-count * part // num_parts), -(-count * (part + 1) // num_parts)
