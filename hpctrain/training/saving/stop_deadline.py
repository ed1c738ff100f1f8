"""Remaining time after a stop signal, and the plan for the last save."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from enum import Enum

from hpctrain.checkpoint.interval import SAVE_MARGIN_S, longest_save_s
from hpctrain.rundir import REQUEUE_GRACE_KEY
from hpctrain.runtime.stopping.stop_grace import read_stop_grace
from hpctrain.runtime.stopping.stop_signals import StopFlag


class StopDeadline:
    """Deadline of the ranks after a stop signal."""

    def __init__(self, environ: Mapping[str, str], stop: StopFlag) -> None:
        """Read the seconds per signal, such as `SIGTERM=30,SIGUSR2=120,requeue=300`.

        Raises:
            UserError: the variable is malformed.
        """
        self._stop = stop
        self._seconds = read_stop_grace(environ)

    def left_s(self, *, for_requeue: bool = False) -> float:
        """Return the seconds until this rank is killed; infinite if unknown, or without a stop signal.

        Args:
            for_requeue: true if the user requested the stop, so that the limit of the signal does not apply.
        """
        if self._stop.signal_name is None:
            return math.inf
        name = REQUEUE_GRACE_KEY if for_requeue else self._stop.signal_name
        return self._stop.received_at + self._seconds.get(name, math.inf) - time.monotonic()


class FinalSavePlan(Enum):
    """Plan for the last save of a stopped run."""

    AFTER_PENDING_SAVE = "finish the save in flight, then save"
    REPLACE_PENDING_SAVE = "abort the save in flight, then save"
    PENDING_SAVE_ONLY = "finish the save in flight; there is no time for another save"
    NONE = "no time for a save"


def plan_final_save(left_s: float, write_s: float | None, in_flight_s: float | None) -> FinalSavePlan:
    """Return the plan that fits into the remaining time; otherwise, the newest checkpoint is kept.

    Args:
        left_s: seconds until the ranks are killed.
        write_s: measured duration of a save; None if unknown; in that case, a save is tried.
        in_flight_s: seconds since the save of an earlier step began; None without such a save.
    """
    if write_s is None:
        return FinalSavePlan.AFTER_PENDING_SAVE
    whole_s = longest_save_s(write_s)
    rest_s = 0.0 if in_flight_s is None else max(SAVE_MARGIN_S, whole_s - in_flight_s)
    if rest_s + whole_s <= left_s:
        return FinalSavePlan.AFTER_PENDING_SAVE
    if whole_s <= left_s:
        return FinalSavePlan.REPLACE_PENDING_SAVE
    if in_flight_s is not None and rest_s <= left_s:
        return FinalSavePlan.PENDING_SAVE_ONLY
    return FinalSavePlan.NONE
