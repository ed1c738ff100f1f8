"""Exchange of records between nodes: each rank keeps a copy of the record of a rank on another node."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.checkpoint.tier.rank_record import SLOT_BYTES, RankRecord
from hpctrain.runtime.distributed_context import DistributedContext

#: Differs from the tags of messages that a script may send in the same group.
_TAG = 1_768_060_019


class RecordExchange:
    """Exchange between the ranks with the same local rank on successive nodes.

    It begins before the last backward pass of a step. No rank can complete the step before all ranks have
    begun.
    """

    def __init__(self, context: DistributedContext) -> None:
        ranks = context.ranks
        self._group = context.cpu_group
        self._target = (ranks.rank + ranks.local_world_size) % ranks.world_size
        #: The rank whose record this rank copies.
        self.source = (ranks.rank - ranks.local_world_size) % ranks.world_size
        self._copy: RankRecord | None = None
        self._received = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
        self._pending: list[Any] = []

    def open(self, path: Path) -> None:
        """Create the copy at `path`. Raises `OSError` if that is impossible."""
        self._copy = RankRecord(path, [])

    def close(self) -> None:
        """Remove the copy. The exchange continues, because other ranks may need it."""
        if self._copy is not None:
            self._copy.remove()
            self._copy = None

    def begin(self, slot: torch.Tensor | None) -> None:
        """Begin exchanging a step's result, or None if there is none, unless the exchange has begun."""
        if self._pending:
            return
        content = torch.zeros(SLOT_BYTES, dtype=torch.uint8) if slot is None else slot
        # If a rank is gone, the step fails. The copies of earlier steps are kept.
        with suppress(RuntimeError):
            self._pending = [
                dist.isend(content, self._target, self._group, _TAG),
                dist.irecv(self._received, self.source, self._group, _TAG),
            ]

    def end(self) -> None:
        """Write the received result to the copy. All ranks must call this after each step."""
        self.begin(None)
        pending, self._pending = self._pending, []
        with suppress(RuntimeError):
            for each in pending:
                each.wait()
            if self._copy is not None and pending:
                self._copy.write_slot(self._received.numpy().tobytes())
