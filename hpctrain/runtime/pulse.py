"""What this rank is doing: a few attributes that the training sets, and that a thread beside it reads.

To set one takes a fraction of a microsecond, so it is done in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

#: `start` is everything until a `Trainer` takes over, or `hpctrain.should_stop` is called for the first time.
Phase = Literal["start", "load", "data", "step", "validate", "save", "end"]


class Pulse:
    """Where a rank is.

    Attributes:
        phase: what it does.
        step: steps that it has trained in this process, or calls of `should_stop`.
        beats: grows with everything that it gets done.
        data_s: seconds that it has waited for data, since it began to train.
        compute_s: seconds that it has computed, as far as they are its own.
        exchange_s: seconds that it has spent with the other ranks: exchanging, and waiting for them.
    """

    __slots__ = ("beats", "compute_s", "data_s", "exchange_s", "phase", "step")

    def __init__(self) -> None:
        self.phase: Phase = "start"
        self.step = self.beats = 0
        self.data_s = self.compute_s = self.exchange_s = 0.0

    def enter(self, phase: Phase) -> None:
        """The rank begins with something else."""
        self.phase = phase
        self.beats += 1

    def trained(self) -> None:
        """A step is done."""
        self.step += 1
        self.beats += 1

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """The rank does this inside the block, and what it did before it afterwards."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)


#: This process's.
pulse = Pulse()
