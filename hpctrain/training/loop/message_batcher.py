"""Number of short work items (steps or batches) per message between the ranks.

A message takes about as long as a short step. Items of some milliseconds or more get a message each; shorter
items share one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds of work that one message covers, if it covers more than one item.
_WORK_S = 0.01
#: Maximum items per message; limits the delay of a stop if items suddenly take longer.
_MOST = 16


class MessageBatcher:
    """Counter of work items; the ranks derive the same message size from the last exchanged duration.

    Attributes:
        size: items in the next message; the same on all ranks.
    """

    def __init__(self, *, one_by_one: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start counting.

        Args:
            one_by_one: if true, each item gets its own message, however short it is.
            clock: monotonic clock in seconds.
        """
        self._most, self._clock = 1 if one_by_one else _MOST, clock
        self.size = 1
        self.begin()

    def begin(self) -> None:
        """Discard unsent items and restart the clock: the time since then went to other work."""
        self._count, self._since = 0, self._clock()

    def add(self) -> None:
        """Count one completed item."""
        self._count += 1

    @property
    def is_full(self) -> bool:
        """True if a message is due now."""
        return self._count >= self.size

    def take(self) -> float:
        """Return this rank's seconds per item since the last call, for the exchange with all ranks."""
        now = self._clock()
        seconds = (now - self._since) / max(self._count, 1)
        self._count, self._since = 0, now
        return seconds

    def hear(self, seconds: float) -> None:
        """Adapt the message size to `seconds` per item, which must be the same on all ranks."""
        self.size = self._most if seconds * self._most <= _WORK_S else max(1, int(_WORK_S / seconds))
