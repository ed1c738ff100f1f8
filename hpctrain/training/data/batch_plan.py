"""Assign the samples of a map-style data set to the ranks of each step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from hpctrain.training.data.sample_order import SampleOrder


@dataclass(frozen=True)
class DataRank:
    rank: int
    world_size: int
    grain_size: int | None = None
    """Number of consecutive samples that form a micro-batch; None if micro-batches may have any size."""

    def part(self, count: int) -> tuple[int, int]:
        """Return this rank's half-open range of a batch of `count` samples."""
        unit = self.grain_size or 1
        low, high = split_range(-(-count // unit), self.rank, self.world_size)
        return min(low * unit, count), min(high * unit, count)

    def largest(self, count: int) -> int:
        unit = self.grain_size or 1
        return min(count, -(-count // (unit * self.world_size)) * unit)


class RankBatch(NamedTuple):
    step: int
    epoch: int
    batch_idx: int
    batch_size: int
    """Total number of samples of all ranks."""
    largest: int
    """Largest number of samples on a rank."""
    indices: torch.Tensor
    """Samples of this rank, as int64; may be empty if the batch has fewer samples than there are ranks.

    Shape [n]; for a stream [n, 2], pairs of shard and sample number in the shard.
    """
    start: int = 0
    """Position of the first sample of this rank in the global batch."""

    def parts(self, micro_batch_size: int | None, grain_size: int | None = None) -> list[tuple[int, int]]:
        """Return this rank's micro-batches as possibly empty ranges; the same number on all ranks."""
        if grain_size is not None:
            num_samples = len(self.indices)
            starts = range(0, self.largest, grain_size)
            return [(min(i, num_samples), min(i + grain_size, num_samples)) for i in starts]
        if micro_batch_size is None:
            return [(0, len(self.indices))]
        count = -(-self.largest // micro_batch_size)
        return [split_range(len(self.indices), i, count) for i in range(count)]


@dataclass(frozen=True)
class BatchPlan:
    """Order of samples, a pure function of the step: step s is in epoch (s - 1) // steps_per_epoch."""

    order: SampleOrder
    global_batch_size: int
    drop_last: bool = False

    @cached_property
    def steps_per_epoch(self) -> int:
        if self.drop_last:
            return self.order.num_samples // self.global_batch_size
        return -(-self.order.num_samples // self.global_batch_size)

    @property
    def max_batch_size(self) -> int:
        return min(self.global_batch_size, self.order.num_samples)

    def identity(self) -> dict[str, Any]:
        return {
            **self.order.identity(),
            "global_batch_size": self.global_batch_size,
            **({"drop_last": True} if self.drop_last else {}),
        }

    def state_dict(self, step: int) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def last_step(self, epochs: int) -> int | None:
        return self.steps_per_epoch * epochs

    def epochs_completed(self, step: int) -> int:
        return step // self.steps_per_epoch

    def seed_round(self, rank_batch: RankBatch) -> int:
        return -rank_batch.step if self.order.repeats else rank_batch.epoch

    def rank_batch(self, step: int, data_rank: DataRank) -> RankBatch:
        epoch, batch = divmod(step - 1, self.steps_per_epoch)
        start = batch * self.global_batch_size
        size = min(self.global_batch_size, self.order.num_samples - start)
        low, high = data_rank.part(size)
        indices = self.order.indices(epoch, start + low, start + high)
        return RankBatch(step, epoch, batch, size, data_rank.largest(size), indices, low)


def split_range(count: int, number: int, num_ranges: int) -> tuple[int, int]:
    """Return range `number` if `count` items are split into `num_ranges`; range 0 is among the largest."""
    return -(-count * number // num_ranges), -(-count * (number + 1) // num_ranges)
