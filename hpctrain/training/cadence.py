"""When a run saves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

from hpctrain.checkpoint.interval import NODE_MTBF_S, Interruptions, checkpoint_interval_s

#: Assumed cost of a save until one was measured, in seconds.
_FIRST_SAVE_S = 2.0
#: After a save that failed, the next is tried so much later, twice as much after each further one.
_FIRST_REST_S, _LONGEST_REST_S = 5.0, 600.0


class CheckpointCadence:
    """Tells after which steps to save: every so many, or as often as pays off (`auto`).

    What goes by the clock goes by rank 0's. The other ranks learn of its wish together with the loss of a
    step, so that all save after the same one.

    Attributes:
        write_s: seconds in which the latest save was written; None before there was one.
    """

    def __init__(
        self,
        every: int | Literal["auto"] | None,
        *,
        num_nodes: int = 1,
        node_mtbf_s: float = NODE_MTBF_S,
        history: Interruptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Count from now.

        Args:
            every: steps between two saves, `auto`, or None.
            num_nodes: nodes of this run, each of which may interrupt it.
            node_mtbf_s: mean time between interruptions of a node, as far as the site knows.
            history: what the run has been through.
            clock: seconds that only go forward.
        """
        self._every, self._num_nodes, self._clock = every, num_nodes, clock
        self._node_mtbf_s, self._history = node_mtbf_s, history or Interruptions()
        self._started = self._begun = clock()
        self._stall_s = _FIRST_SAVE_S
        self.write_s: float | None = None
        self._in_flight = False
        self._failures, self._rests_until = 0, -math.inf

    @property
    def mtbf_s(self) -> float:
        """Mean time between interruptions of the run, by what is known now."""
        own = self._num_nodes * (self._clock() - self._started)
        seen = Interruptions(self._history.count, self._history.node_seconds + own)
        return seen.node_mtbf_s(self._node_mtbf_s) / self._num_nodes

    @property
    def interval_s(self) -> float:
        """Seconds between the beginnings of two saves that pay off best."""
        return checkpoint_interval_s(self._stall_s, self.write_s or 0.0, self.mtbf_s)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`, by its number; the same on all ranks."""
        return isinstance(self._every, int) and step % self._every == 0

    def wishes(self) -> bool:
        """Whether this rank wants a checkpoint soon, by the clock."""
        if self._in_flight:
            return False
        if self._failures:
            return not self.rests
        return self._every == "auto" and self._clock() >= self._begun + self.interval_s

    @property
    def rests(self) -> bool:
        """Whether nothing shall be tried yet, since the latest save failed a short while ago."""
        return self._clock() < self._rests_until

    @property
    def is_troubled(self) -> bool:
        """Whether the latest save that has ended failed."""
        return self._failures > 0

    def begun(self, stall_s: float) -> None:
        """A save has begun, and has held up the training for `stall_s`."""
        self._begun, self._stall_s, self._in_flight = self._clock() - stall_s, stall_s, True

    def saved(self, write_s: float) -> None:
        """The save was committed, `write_s` seconds after it had begun."""
        self.write_s, self._in_flight, self._failures = write_s, False, 0

    def failed(self) -> None:
        """The save was not committed."""
        rest_s = min(_LONGEST_REST_S, _FIRST_REST_S * 2**self._failures)
        self._in_flight, self._rests_until = False, self._clock() + rest_s
        self._failures += 1
