"""Schedule of copies of the state in memory, from which the run resumes after the failure of a rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hpctrain.training.saving.checkpoint_schedule import Backoff

#: Maximum share of the time that copies take.
_MAX_SHARE = 0.02


class CopySchedule:
    """Schedule of copies: for a given number of steps to repeat, or by the measured cost of a copy.

    Time-based decisions use rank 0's clock, as in `CheckpointSchedule`.

    Attributes:
        every: steps between two copies; None with a measured interval.
        waits: True if training waits for the end of each copy and save.
        interval_s: seconds between the starts of two copies, if measured; infinite during a copy.
        backoff: pause after a failed copy.
    """

    def __init__(self, max_repeated: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the schedule.

        Args:
            max_repeated: number of steps that a failure may repeat; None measures the cost of a copy.
            clock: monotonic clock in seconds.
        """
        # A failure may interrupt a copy, so that the run resumes from the copy before.
        self.every = None if max_repeated is None else max(1, max_repeated // 2)
        self.waits = max_repeated == 1
        self._clock, self._begun_at = clock, clock()
        self.interval_s = 0.0
        self.backoff = Backoff(clock)

    def is_due_by_step(self, step: int) -> bool:
        """Return true if `step` is a multiple of the interval; the same on all ranks."""
        return self.every is not None and step % self.every == 0

    def is_due_by_time(self) -> bool:
        """Return true if this rank's clock requires a copy soon."""
        is_due = self.every is None and self._clock() >= self._begun_at + self.interval_s
        return is_due and not self.backoff.is_active

    def on_started(self) -> None:
        """Record the start of a copy."""
        self._begun_at, self.interval_s = self._clock(), math.inf

    def on_copied(self, seconds: float) -> None:
        """Record the end of a copy, `seconds` after its start."""
        self.interval_s = seconds / _MAX_SHARE
        self.backoff.reset()

    def on_failed(self) -> None:
        """Record a failed copy."""
        self.interval_s = 0.0
        self.backoff.begin()
