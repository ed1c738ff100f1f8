"""What is asked of a disk that may hang: done in threads, and waited for by all ranks, no longer than agreed.

A call that makes, renames or syncs a file can hang in the kernel for as long as it likes; no signal ends it
there. So no rank makes such a call where others, or the training, wait for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from hpctrain.checkpoint.agreement import Agreement, reason

T = TypeVar("T")

_SHORTEST_ROUND_S, _LONGEST_ROUND_S = 0.001, 0.2
#: How long a disk that hangs is waited for where all is to be given up, in seconds.
_PATIENCE_AT_THE_END_S = 5.0


class Errand(Generic[T]):
    """Something to be done on a disk.

    Attributes:
        result: what it has brought, once it has ended well.
        problem: what went wrong, or None.
        moved_at: when the disk last took something, by the monotonic clock.
        ended: set once nothing more will be done.
        stop: set by others, to have it end early, where it heeds that.
    """

    def __init__(self, work: Callable[[], T] | None = None) -> None:
        """Prepare to do `work`."""
        self._work = work
        self.result: T | None = None
        self.problem: str | None = None
        self.moved_at = time.monotonic()
        self.ended, self.stop = threading.Event(), threading.Event()

    def run(self) -> None:
        """Do it."""
        self.moved_at = time.monotonic()
        try:
            self.result = self.work()
        except Exception as error:  # noqa: BLE001 (the ranks are told by `problem`)
            self.problem = self.problem or reason(error)
        finally:
            self.ended.set()

    def work(self) -> T | None:
        """What is to be done."""
        return self._work() if self._work else None

    def wait(self, patience_s: float) -> bool:
        """Wait until it has ended, and say whether it has.

        Args:
            patience_s: how long the disk may take nothing, in seconds.
        """
        while not self.ended.wait(max(0.0, self.moved_at + patience_s - time.monotonic())):
            if self.hangs(patience_s):
                return False
        return True

    def hangs(self, patience_s: float) -> bool:
        """Whether it has not ended, and the disk has taken nothing for so long; that is its problem then."""
        if self.ended.is_set() or time.monotonic() - self.moved_at < patience_s:
            return False
        self.problem = f"the disk has taken nothing for {patience_s:g} s"
        return True


class Hand:
    """Does one errand after the other, in a thread that is there while there are any.

    So what is asked for while an earlier errand hangs, such as to clear away what that one leaves, is done
    after it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: deque[Errand[Any]] = deque()
        self._is_busy = False

    def do(self, work: Callable[[], T]) -> Errand[T]:
        """Have something done; returns at once."""
        errand = Errand(work)
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


def wait_for_all(
    agreement: Agreement,
    errand: Errand[Any] | None,
    give_up: threading.Event,
    *,
    patience_s: float,
    failure: str,
) -> bool:
    """Wait until no rank has anything to do any more; say whether any asked to give up.

    The ranks look at each other several times a second. So where one fails, or asks to give up, the others
    are told to stop early. All ranks must call this.

    Args:
        agreement: the ranks.
        errand: this rank's, which is under way; None if it has none.
        give_up: asks all ranks to give up, when set on any.
        patience_s: how long a disk may take nothing, in seconds.
        failure: what it means where it fails, as the beginning of a sentence.
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


def _nothing() -> Errand[Any]:
    errand: Errand[Any] = Errand()
    errand.run()
    return errand
