"""Stop a script without the Trainer after the same optimizer step on all ranks.

An immediate exit on a stop signal could interrupt a write. Instead, the rank requests a common step from the
supervisor, which requests the position of every rank. Each rank answers from its heartbeat thread, even while
its main thread waits for other ranks. The rank does not continue after its current step until the supervisor
has replied. The common step is the latest of these steps, so every rank can still reach it, and no rank waits
for a stopped rank.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from contextlib import suppress

from hpctrain.errors import UserError
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.stopping.signal_recorder import read_stop_grace

#: Maximum seconds from the request to the common step, before the rank exits immediately: this time, or this
#: fraction of the grace time after the signal, if shorter.
AGREEMENT_TIMEOUT_S, _SHARE_OF_GRACE = 10.0, 1 / 3


def agreement_timeout_s(number: signal.Signals, environ: Mapping[str, str]) -> float:
    with suppress(UserError):  # this runs in a signal handler
        if (grace_s := read_stop_grace(environ).get(number.name)) is not None:
            return min(AGREEMENT_TIMEOUT_S, grace_s * _SHARE_OF_GRACE)
    return AGREEMENT_TIMEOUT_S


class AgreedStop:
    """State of the agreement in this rank. `request` and `after_step` are called in the main thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wait_after: int | None = None
        self._stop_after: int | None = None
        self.is_enabled = False
        """True if the supervisor can receive requests."""
        self.signal: signal.Signals | None = None
        """The signal that caused this rank's request."""

    def request(self, number: signal.Signals) -> bool:
        """Request a common step; return false without counted steps or after an earlier request."""
        if self.signal is not None or not self._is_possible():
            return False
        self.signal = number
        return True

    def prepare(self) -> int | None:
        """Return the step after which this rank will wait for `stop_after`; None without counted steps."""
        with self._changed:
            if not self._is_possible():
                return None
            if self._wait_after is None:
                # From now on, the main thread waits for the lock after a step, so the number cannot change.
                self._wait_after = 0
                self._wait_after = activity.step + 1
            return self._wait_after

    def stop_after(self, step: int | None) -> None:
        """Set the step after which all ranks stop; None if they cannot agree."""
        with self._changed:
            self._stop_after = step
            if step is None:
                self._give_up()
            self._changed.notify_all()

    def after_step(self) -> bool:
        """Return true if the rank must stop now. Waits for the supervisor's reply if necessary."""
        if self._wait_after is None:
            return False
        with self._changed:
            if self._wait_after is None or activity.step < self._wait_after:
                return False
            self._changed.wait_for(
                lambda: self._stop_after is not None or self._wait_after is None, AGREEMENT_TIMEOUT_S
            )
            if self._stop_after is None:
                self._give_up()
                return False
            return activity.step >= self._stop_after

    def _is_possible(self) -> bool:
        return self.is_enabled and activity.step > 0 and not activity.is_managed

    def _give_up(self) -> None:
        self._wait_after, self.is_enabled = None, False


#: The agreement of this process.
agreed_stop = AgreedStop()
