"""In which order the samples of a stream are trained, and which rank reads them: pure functions.

A stream is a set of shards, each of which is read from its beginning. In round k each shard that is longer
than k gives its sample number k, in the order of the shards; one that has ended leaves. How long a shard is
shows only when it ends: until then it counts as endless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

Number = TypeVar("Number", int, torch.Tensor)

#: The length of a shard whose end nobody has seen yet.
ENDLESS = 2**62


@dataclass(frozen=True)
class Cursor:
    """A position in a stream, between two batches."""

    epoch: int = 0
    batch: int = 0
    """Batches of the epoch before it."""
    round: int = 0
    shard: int = 0
    """Shards below this one have given their sample of the round already."""

    def taken(self, lengths: torch.Tensor) -> torch.Tensor:
        """Samples of each shard before the cursor, in its epoch; shape of `lengths`, int64."""
        given = torch.full_like(lengths, self.round)
        given[: self.shard] += 1
        return torch.minimum(given, lengths)


@dataclass(frozen=True, eq=False)
class StreamBatch:
    """A global batch of a stream."""

    epoch: int
    batch_idx: int
    picks: torch.Tensor
    """Shape [n, 2], int64: of each sample its shard, and its number in there."""
    after: Cursor


def next_batch(lengths: torch.Tensor, cursor: Cursor, count: int) -> StreamBatch | None:
    """The next `count` samples from `cursor` on, or what is left of its epoch; None where nothing is.

    Args:
        lengths: of the shards in this epoch, int64 of shape [num_shards]; `ENDLESS` where it is not known.
        cursor: where to begin.
        count: samples of a batch, at least 1.
    """
    parts: list[torch.Tensor] = []
    first_round, first_shard, missing = cursor.round, cursor.shard, count
    while missing:
        shards = (lengths > first_round).nonzero().flatten()
        if not len(shards):
            break
        rounds = torch.arange(first_round, first_round + missing // len(shards) + 2)
        rows, columns = (lengths[shards] > rounds[:, None]).nonzero(as_tuple=True)
        grid = torch.stack([shards[columns], rounds[rows]], dim=1)
        given = (grid[:, 1] == first_round) & (grid[:, 0] < first_shard)
        picks = grid[~given][:missing]
        parts.append(picks)
        missing -= len(picks)
        first_round, first_shard = int(rounds[-1]) + 1, 0
    picks = torch.cat(parts) if parts else torch.empty(0, 2, dtype=torch.int64)
    if not len(picks):
        return None
    last_shard, last_round = picks[-1].tolist()
    after = Cursor(cursor.epoch, cursor.batch + 1, last_round, last_shard + 1)
    return StreamBatch(cursor.epoch, cursor.batch, picks, after)


def reader(shard: Number, number: Number, num_shards: int, world_size: int) -> Number:
    """The rank that trains sample `number` of `shard`; for whole numbers, or for int64 tensors of them.

    Where there are fewer shards than ranks, several ranks read the same shard and take turns.
    """
    if num_shards >= world_size:
        return shard % world_size
    ranks_of_shard = (world_size - 1 - shard) // num_shards + 1
    return shard + num_shards * (number % ranks_of_shard)


def shards_of(rank: int, num_shards: int, world_size: int) -> list[int]:
    """The shards of which `rank` trains samples."""
    return list(range(rank, num_shards, world_size)) if num_shards >= world_size else [rank % num_shards]
