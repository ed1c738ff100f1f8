"""As many batches on every rank, for forward passes in which ranks wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from hpctrain.runtime.process_group import Team


def in_lockstep(batches: Iterator[tuple[int, Any]], team: Team) -> Iterator[tuple[int, Any]]:
    """Yield (number of samples, batch) as often as the rank that has most batches does.

    A rank that has none left gets with 0 samples the batch that it had last or, if it never had one, that of
    another rank. All ranks must go through this alike.
    """
    held: tuple[int, Any] | None = None
    new = next(batches, None)
    while who := [rank for rank, has in enumerate(team.gather(new is not None)) if has]:
        if held is None and len(who) < team.ranks.world_size:  # only before the first batch of all
            lent = [new if team.ranks.rank == who[0] else None]
            dist.broadcast_object_list(lent, src=who[0], group=team.control)
            held = lent[0]
        held = new or held
        assert held is not None
        yield (held[0] if new else 0), held[1]
        new = next(batches, None)
