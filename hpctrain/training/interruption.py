"""A long way through batches, such as a validation, that all ranks leave together after a stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from hpctrain.runtime.process_group import Team
from hpctrain.runtime.signals import StopFlag
from hpctrain.training.grouping import Grouping
from hpctrain.training.report import begin_sum

T = TypeVar("T")


class Interruptible:
    """Lets the ranks go through batches, each through its own, until one of them is told to stop.

    What they tell each other is read one batch later, as in training. A rank that has no batch left goes on
    to answer until none has.

    Attributes:
        interrupted: whether the ranks have left: all after the same number of batches.
    """

    def __init__(self, team: Team, stop: StopFlag) -> None:
        """Begin.

        Args:
            team: the ranks.
            stop: tells whether this rank was told to stop.
        """
        self._team, self._stop, self._grouping = team, stop, Grouping()
        self._read: Callable[[], list[float]] | None = None
        self.interrupted = False

    def through(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield `batches`, to their end or to the agreed stop. All ranks must go through this."""
        for batch in batches:
            yield batch
            self._grouping.add()
            self._hear()
            if self.interrupted:
                return
            if self._grouping.is_full:
                self._tell(has_more=True)
        go_on = True
        while go_on:
            if self._read is None:
                self._tell(has_more=False)
            go_on = self._hear()

    def _tell(self, *, has_more: bool) -> None:
        seconds = self._grouping.take() if has_more else 0.0
        self._read = begin_sum(self._team, [float(self._stop.is_set), float(has_more), seconds])

    def _hear(self) -> bool:
        """Read what was told, if anything was; whether a rank has batches left, and is to go through them."""
        if self._read is None:
            return True
        stop, num_busy, seconds = self._read()
        self._read = None
        self.interrupted = stop > 0
        if num_busy:
            self._grouping.hear(seconds / num_busy)
        return num_busy > 0 and not self.interrupted
