"""Long loop over batches, such as a validation, that all ranks leave together after a stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.stopping.stop_signals import StopFlag
from hpctrain.training.loop.message_batcher import MessageBatcher
from hpctrain.training.loop.step_sync import start_sum

T = TypeVar("T")


class StoppableLoop:
    """Loop in which each rank iterates over its own batches until one receives a stop signal.

    Messages are read one batch later, as in training. A rank without batches keeps answering until all ranks
    are done.

    Attributes:
        interrupted: True if the ranks stopped early; all after the same number of batches.
    """

    def __init__(self, context: DistributedContext, stop: StopFlag) -> None:
        """Start without messages.

        Args:
            context: the ranks.
            stop: this rank's stop flag.
        """
        self._context, self._stop, self._grouping = context, stop, MessageBatcher()
        self._read: Callable[[], list[float]] | None = None
        self.interrupted = False

    def through(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield `batches`, to their end or to the agreed stop. All ranks must iterate over this."""
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
        self._read = start_sum(self._context, [float(self._stop.is_set), float(has_more), seconds])

    def _hear(self) -> bool:
        """Read the pending message, if any; return True if a rank has batches left and there is no stop."""
        if self._read is None:
            return True
        stop, num_busy, seconds = self._read()
        self._read = None
        self.interrupted = stop > 0
        if num_busy:
            self._grouping.hear(seconds / num_busy)
        return num_busy > 0 and not self.interrupted
