"""What to tell those who wait while nobody can say where their run stands."""

from __future__ import annotations

import time

from hpctrain.jobs.states import RunState
from hpctrain.jobs.status import RunStatus

#: Seconds between two sentences that say the same.
_INTERVAL_S = 60.0


def unknown_for(status: RunStatus) -> str:
    """As in `unknown for 35 s (squeue gave no answer within 60 s)`."""
    since = "" if status.unknown_s is None else f" for {status.unknown_s:.0f} s"
    return f"unknown{since}" + (f" ({status.words})" if status.words else "")


class Doubt:
    """Has a sentence when a run's state becomes unknown, now and then while it is, and when it is known."""

    def __init__(self) -> None:
        self._next: float | None = None

    def words(self, status: RunStatus) -> str | None:
        """What to say of this status; mostly nothing."""
        if status.state is not RunState.UNKNOWN:
            was_unknown, self._next = self._next is not None, None
            return f"known again, {status.state}" if was_unknown else None
        now = time.monotonic()
        if self._next is not None and now < self._next:
            return None
        self._next = now + _INTERVAL_S
        return f"where it stands is {unknown_for(status)}; that does not end it"
