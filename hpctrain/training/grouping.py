"""How many short pieces of work go into one message between the ranks.

A message takes about as long as a short step. What is told of pieces that take some milliseconds or more
goes out after each of them; what is told of shorter ones, of several together.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds of work that one message is about, where that is more than one piece.
_WORK_S = 0.01
#: Pieces in a message at the most: so late is a stop noticed where they suddenly take longer.
_MOST = 16


class Grouping:
    """Counts pieces of work; the ranks agree on how many go into a message by what the last one told.

    Attributes:
        size: pieces in the next message; the same on all ranks.
    """

    def __init__(self, *, one_by_one: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin to count.

        Args:
            one_by_one: whether each piece has a message of its own, however short it is.
            clock: seconds that only go forward.
        """
        self._most, self._clock = 1 if one_by_one else _MOST, clock
        self.size = 1
        self.begin()

    def begin(self) -> None:
        """Forget what is not told yet: what has gone on meanwhile was other work."""
        self._count, self._since = 0, self._clock()

    def add(self) -> None:
        """A piece is done."""
        self._count += 1

    @property
    def is_full(self) -> bool:
        """Whether a message is to be sent now."""
        return self._count >= self.size

    def take(self) -> float:
        """Seconds that each piece since the last call took on this rank, which all ranks are to hear of."""
        now = self._clock()
        seconds = (now - self._since) / max(self._count, 1)
        self._count, self._since = 0, now
        return seconds

    def hear(self, seconds: float) -> None:
        """Fit the next messages to pieces that take so long: a value that all ranks have heard alike."""
        self.size = self._most if seconds * self._most <= _WORK_S else max(1, int(_WORK_S / seconds))
