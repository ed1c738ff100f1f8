"""Pure functions for the order of a stream's samples, and for their assignment to ranks.

A stream is a set of shards, each read from its beginning. In round k, each shard longer than k provides its
sample number k, in the order of the shards. Ended shards are skipped. The length of a shard is determined at
its end; until then, the shard counts as endless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

Number = TypeVar("Number", int, torch.Tensor)

#: Length of a shard whose end has not been reached yet.
UNKNOWN_LENGTH = 2**62


@dataclass(frozen=True)
class StreamCursor:
    """Position in a stream, between two batches."""

    epoch: int = 0
    batch: int = 0
    """Number of batches of the epoch before this position."""
    round: int = 0
    shard: int = 0
    """Shards before this shard have already provided their sample of the round."""

    def taken(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the number of samples of each shard before the cursor in its epoch, int64 like `lengths`."""
        given = torch.full_like(lengths, self.round)
        given[: self.shard] += 1
        return torch.minimum(given, lengths)


@dataclass(frozen=True, eq=False)
class StreamBatch:
    epoch: int
    batch_idx: int
    picks: torch.Tensor
    """Shard of each sample, and index of the sample in the shard; int64 of shape [n, 2]."""
    after: StreamCursor


def next_batch(lengths: torch.Tensor, cursor: StreamCursor, count: int) -> StreamBatch | None:
    """Return the next `count` samples from `cursor`, or the rest of its epoch; None if nothing is left."""
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
    after = StreamCursor(cursor.epoch, cursor.batch + 1, last_round, last_shard + 1)
    return StreamBatch(cursor.epoch, cursor.batch, picks, after)


def owner_rank(shard: Number, number: Number, num_shards: int, world_size: int) -> Number:
    """Return the rank that trains a sample; several ranks that read the same shard take turns."""
    if num_shards >= world_size:
        return shard % world_size
    ranks_of_shard = (world_size - 1 - shard) // num_shards + 1
    return shard + num_shards * (number % ranks_of_shard)


def list_rank_shards(rank: int, num_shards: int, world_size: int) -> list[int]:
    return list(range(rank, num_shards, world_size)) if num_shards >= world_size else [rank % num_shards]
