"""Disk operations that may hang: they run in threads, and all ranks wait for them with a limit.

A call that creates, renames or syncs a file can hang in the kernel indefinitely, and no signal ends it.
Therefore no rank makes such a call in a thread for which other ranks or the training wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from hpctrain.checkpoint.io.coordination import RankCoordinator, describe_exception

T = TypeVar("T")

_SHORTEST_ROUND_S, _LONGEST_ROUND_S = 0.001, 0.2
#: Limit on the wait for a hanging disk once a save is being given up, in seconds.
_PATIENCE_AT_THE_END_S = 5.0


class IoTask(Generic[T]):
    """A disk operation.

    Attributes:
        result: the return value, once it has succeeded.
        problem: the error, or None.
        moved_at: time of the last disk progress, by the monotonic clock.
        ended: set once nothing more will be done.
        stop: set by others to request an early end, which not all work supports.
    """

    def __init__(self, work: Callable[[], T] | None = None) -> None:
        """Prepare to run `work`."""
        self._work = work
        self.result: T | None = None
        self.problem: str | None = None
        self.moved_at = time.monotonic()
        self.ended, self.stop = threading.Event(), threading.Event()

    def run(self) -> None:
        """Run the work; store its result or problem."""
        self.moved_at = time.monotonic()
        try:
            self.result = self.work()
        except Exception as error:  # noqa: BLE001 (reported to the ranks through `problem`)
            self.problem = self.problem or describe_exception(error)
        finally:
            self.ended.set()

    def work(self) -> T | None:
        """Do the work; subclasses may override this."""
        return self._work() if self._work else None

    def wait(self, patience_s: float) -> bool:
        """Wait until it has ended; return False if the disk hangs.

        Args:
            patience_s: longest time without disk progress, in seconds.
        """
        while not self.ended.wait(max(0.0, self.moved_at + patience_s - time.monotonic())):
            if self.hangs(patience_s):
                return False
        return True

    def hangs(self, patience_s: float) -> bool:
        """True if it is unfinished without disk progress for `patience_s` seconds; then sets `problem`."""
        if self.ended.is_set() or time.monotonic() - self.moved_at < patience_s:
            return False
        self.problem = f"the disk has accepted no data for {patience_s:g} s"
        return True


class IoThread:
    """Queue of tasks that run one after the other, in a thread that exists only while there are any.

    A task that is queued while an earlier one hangs, such as its cleanup, therefore runs after it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: deque[IoTask[Any]] = deque()
        self._is_busy = False

    def do(self, work: Callable[[], T]) -> IoTask[T]:
        """Queue `work` and return at once."""
        errand = IoTask(work)
        with self._lock:
            self._asked.append(errand)
            if self._is_busy:
                return errand
            self._is_busy = True
        threading.Thread(target=self._run, name="hpctrain-checkpoint-folder", daemon=True).start()
        return errand

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._asked:
                    self._is_busy = False
                    return
                errand = self._asked.popleft()
            errand.run()


def wait_on_all_ranks(
    agreement: RankCoordinator,
    errand: IoTask[Any] | None,
    give_up: threading.Event,
    *,
    patience_s: float,
    failure: str,
) -> bool:
    """Wait until no rank has unfinished work; return True if any rank asked to give up.

    The ranks exchange their status several times a second. If one fails or asks to give up, the others stop
    early. All ranks must call this.

    Args:
        agreement: the ranks.
        errand: this rank's running task; None if it has none.
        give_up: makes all ranks give up when set on any of them.
        patience_s: longest time without disk progress, in seconds.
        failure: description of a failure, as the start of a sentence.
    """
    round_s, given_up = _SHORTEST_ROUND_S, False
    errand = errand or _nothing()
    while True:
        ended = errand.ended.wait(round_s) or errand.hangs(patience_s)
        unfinished, failed, giving_up = agreement.counts(
            not ended, errand.problem is not None, give_up.is_set(), waiting_for=failure
        )
        if giving_up:
            given_up, patience_s = True, min(patience_s, _PATIENCE_AT_THE_END_S)
        if failed or given_up:
            errand.stop.set()
        if not unfinished:
            return given_up
        round_s = min(_LONGEST_ROUND_S, round_s * 1.5)


def _nothing() -> IoTask[Any]:
    errand: IoTask[Any] = IoTask()
    errand.run()
    return errand
