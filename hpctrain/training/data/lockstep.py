"""Equal numbers of batches on all ranks, for forward passes with collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpctrain.runtime.distributed_context import DistributedContext


def pad_to_longest(batches: Iterator[tuple[int, Any]], team: DistributedContext) -> Iterator[tuple[int, Any]]:
    """Yield (number of samples, batch) as often as the rank with the most batches.

    A rank that has none left yields its last batch with 0 samples, or another rank's batch if it never had
    one. All ranks must call this.
    """
    held: tuple[int, Any] | None = None
    new = next(batches, None)
    while who := [rank for rank, has in enumerate(team.gather(new is not None)) if has]:
        if held is None and len(who) < team.ranks.world_size:  # only possible before the first batch
            held = team.broadcast(new, who[0], "a batch for ranks that have none")
        held = new or held
        assert held is not None
        yield (held[0] if new else 0), held[1]
        new = next(batches, None)
