"""When a run saves and validates."""

from __future__ import annotations

import time
from typing import Literal

from hpctrain.checkpoint.interval import checkpoint_interval_s

#: Assumed cost of a save until one was measured, in seconds.
_FIRST_SAVE_S = 2.0


class CheckpointCadence:
    """Tells after which steps to save: every so many, or as often as pays off (`auto`).

    `auto` goes by rank 0's clock. The other ranks learn of its wish together with the loss of a step, so
    that all save after the same one.
    """

    def __init__(self, every: int | Literal["auto"] | None, num_nodes: int) -> None:
        self._every = every
        self._num_nodes = num_nodes
        self.saved(_FIRST_SAVE_S)

    def saved(self, seconds: float) -> None:
        """A save took `seconds`; count from now."""
        self._next = time.monotonic() + checkpoint_interval_s(seconds, self._num_nodes)

    def wishes(self) -> bool:
        """Whether rank 0 wants a checkpoint soon, by the clock."""
        return self._every == "auto" and time.monotonic() >= self._next

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`, by its number."""
        return isinstance(self._every, int) and step % self._every == 0
