"""Current activity of this rank: attributes that the training sets and the heartbeat thread reads.

Setting one takes a fraction of a microsecond, so it is done in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.records.rank_phase import RankPhase


class RankActivity:
    """Current phase and progress of a rank.

    Attributes:
        phase: the current phase.
        step: steps trained in this process, or calls of `should_stop`.
        beats: grows with any progress.
        data_s: seconds spent waiting for data since the training began.
        compute_s: seconds of computation, as far as they can be separated.
        exchange_s: seconds of communication with other ranks, including waiting for them.
    """

    __slots__ = ("beats", "compute_s", "data_s", "exchange_s", "phase", "step")

    def __init__(self) -> None:
        self.phase = RankPhase.START
        self.step = self.beats = 0
        self.data_s = self.compute_s = self.exchange_s = 0.0

    def enter(self, phase: RankPhase) -> None:
        """Set the current phase."""
        self.phase = phase
        self.beats += 1

    def trained(self) -> None:
        """Count a completed step."""
        self.step += 1
        self.beats += 1

    @contextmanager
    def during(self, phase: RankPhase) -> Iterator[None]:
        """Set the phase inside the block, and restore the previous one afterwards."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)


#: The activity of this process.
activity = RankActivity()
