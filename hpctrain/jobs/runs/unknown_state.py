"""Messages and a time limit for callers that wait for a run in an unknown state.

Waiting ends after a time without an answer, and at once if the scheduler reports that the run cannot start.
"""

from __future__ import annotations

import math
import time

from hpctrain.errors import SchedulerError
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.slurm.states import RunState

#: Maximum seconds to wait without an answer from the scheduler or new output of the run. A restarting
#: controller returns within minutes; a replaced controller never returns.
UNKNOWN_LIMIT_S = 3600.0
#: Seconds between two identical messages.
_INTERVAL_S = 60.0


def describe_unknown(status: RunStatus) -> str:
    """Describe the state, as in `unknown for 35 s (squeue did not respond within 60 s)`."""
    since = "" if status.unknown_s is None else f" for {status.unknown_s:.0f} s"
    return f"unknown{since}" + (f" ({status.words})" if status.words else "")


class UnknownStateTracker:
    """Messages on a run whose state becomes unknown, stays unknown or is available again.

    Ends the wait if the state is unknown for too long.
    """

    def __init__(self, limit_s: float = UNKNOWN_LIMIT_S) -> None:
        """Start with a definite state.

        Args:
            limit_s: seconds in which neither the scheduler answers nor the run writes anything.
        """
        self._limit_s = limit_s
        self._since: float | None = None
        self._next = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the limit if nothing changes; infinite unless the state is unknown."""
        return math.inf if self._since is None else max(0.0, self._since + self._limit_s - time.monotonic())

    def message_for(self, status: RunStatus) -> str | None:
        """Return the message for this status; usually None.

        Raises:
            SchedulerError: the limit is reached, or the run will never start.
        """
        if status.never_starts:
            raise SchedulerError(
                f"Stopped waiting: run {status.run_id} will never start "
                f"({status.words or 'its dependency can no longer be satisfied'}). Cancel the run, and "
                "submit it again with another --dependency."
            )
        now = time.monotonic()
        if status.state is not RunState.UNKNOWN:
            was_unknown, self._since = self._since is not None, None
            return f"the state is available again ({status.state})" if was_unknown else None
        if self._since is None:
            self._since = self._next = now
        # A run that still writes is alive, even if the scheduler does not respond.
        if self.left_s == 0 and (status.unknown_s is None or status.unknown_s >= self._limit_s):
            raise SchedulerError(
                f"Stopped waiting for run {status.run_id} after {self._limit_s:g} s (state: "
                f"{describe_unknown(status)}). The run has not written anything, but may still be active. "
                "Check again when the scheduler responds."
            )
        if now < self._next:
            return None
        self._next = now + _INTERVAL_S
        return f"the state is {describe_unknown(status)}; this does not affect the run"
