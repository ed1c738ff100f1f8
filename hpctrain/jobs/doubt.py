"""What to tell those who wait while nobody can say where their run stands, and when to wait no longer.

That is after a while without an answer, and at once where the scheduler says that the run cannot start.
"""

from __future__ import annotations

import math
import time

from hpctrain.errors import SchedulerError
from hpctrain.jobs.states import RunState
from hpctrain.jobs.status import RunStatus

#: Seconds without an answer of the scheduler's and without a sign of the run after which waiting is in vain:
#: a controller that restarts is back in minutes, one that was set up anew elsewhere never.
UNKNOWN_LIMIT_S = 3600.0
#: Seconds between two sentences that say the same.
_INTERVAL_S = 60.0


def unknown_for(status: RunStatus) -> str:
    """As in `unknown for 35 s (squeue gave no answer within 60 s)`."""
    since = "" if status.unknown_s is None else f" for {status.unknown_s:.0f} s"
    return f"unknown{since}" + (f" ({status.words})" if status.words else "")


class Doubt:
    """Has a sentence when a run's state becomes unknown, now and then while it is, and when it is known.

    It ends the waiting where that goes on for too long.
    """

    def __init__(self, limit_s: float = UNKNOWN_LIMIT_S) -> None:
        """Know of nothing yet.

        Args:
            limit_s: seconds in which neither the scheduler answers nor the run writes anything.
        """
        self._limit_s = limit_s
        self._since: float | None = None
        self._next = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the limit, if nothing is heard; infinite where the state is known."""
        return math.inf if self._since is None else max(0.0, self._since + self._limit_s - time.monotonic())

    def words(self, status: RunStatus) -> str | None:
        """What to say of this status; mostly nothing.

        Raises:
            SchedulerError: the limit is reached, or the run will never start.
        """
        if status.never_starts:
            raise SchedulerError(
                f"Run {status.run_id} will never start, so nobody waits for it any longer: "
                f"{status.words or 'what it depends on cannot come any more'}. Cancel it, and submit it "
                "again with another --dependency."
            )
        now = time.monotonic()
        if status.state is not RunState.UNKNOWN:
            was_unknown, self._since = self._since is not None, None
            return f"known again, {status.state}" if was_unknown else None
        if self._since is None:
            self._since = self._next = now
        # A run that still writes goes on, whatever has become of the scheduler.
        if self.left_s == 0 and (status.unknown_s is None or status.unknown_s >= self._limit_s):
            raise SchedulerError(
                f"Nobody could tell for {self._limit_s:g} s where run {status.run_id} stands: it is "
                f"{unknown_for(status)}, and has written nothing. It may go on all the same: look again when "
                "the scheduler answers."
            )
        if now < self._next:
            return None
        self._next = now + _INTERVAL_S
        return f"where it stands is {unknown_for(status)}; that does not end it"
