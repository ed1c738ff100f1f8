"""How much time is left after the ranks were told to stop, and what of saving fits into it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from enum import Enum

from hpctrain.errors import UserError
from hpctrain.rundir import GRACE_OF_REQUEUE, STOP_GRACE_VARIABLE
from hpctrain.runtime.signals import StopFlag

#: What a save may take longer than the one that was measured: this much, and this many times.
_MARGIN_S, _MARGIN_FACTOR = 2.0, 1.25


class Grace:
    """The time that a stop signal leaves to the ranks."""

    def __init__(self, environ: Mapping[str, str], stop: StopFlag) -> None:
        """Read how long each signal leaves, such as `SIGTERM=30,SIGUSR2=120,requeue=300` in seconds.

        Raises:
            UserError: the variable says something else.
        """
        self._stop = stop
        self._seconds = _parse(environ.get(STOP_GRACE_VARIABLE, ""))

    def left_s(self, *, for_requeue: bool = False) -> float:
        """Seconds until this rank is ended; infinite where that is not known, or it was told nothing.

        Args:
            for_requeue: whether it was the user who had it told, by a signal that means less time otherwise.
        """
        if self._stop.signal_name is None:
            return math.inf
        name = GRACE_OF_REQUEUE if for_requeue else self._stop.signal_name
        return self._stop.noted_at + self._seconds.get(name, math.inf) - time.monotonic()


class LastSave(Enum):
    """What to do with the state when the run is told to stop."""

    AFTER_THE_ONE_IN_FLIGHT = "finish the save in flight, then save"
    IN_ITS_PLACE = "abandon the save in flight, and save"
    THE_ONE_IN_FLIGHT = "finish the save in flight; another does not fit"
    NONE = "no save fits"


def plan_last_save(left_s: float, write_s: float | None, in_flight_s: float | None) -> LastSave:
    """What fits into the time that is left; a save that does not is not begun, and what stands stands.

    Args:
        left_s: seconds until the ranks are ended.
        write_s: how long a save takes, as measured; None where none was: then it is tried.
        in_flight_s: for how long a save of an earlier step has been written; None where none is.
    """
    if write_s is None:
        return LastSave.AFTER_THE_ONE_IN_FLIGHT
    whole_s = write_s * _MARGIN_FACTOR + _MARGIN_S
    rest_s = 0.0 if in_flight_s is None else max(_MARGIN_S, whole_s - in_flight_s)
    if rest_s + whole_s <= left_s:
        return LastSave.AFTER_THE_ONE_IN_FLIGHT
    if whole_s <= left_s:
        return LastSave.IN_ITS_PLACE
    if in_flight_s is not None and rest_s <= left_s:
        return LastSave.THE_ONE_IN_FLIGHT
    return LastSave.NONE


def _parse(text: str) -> dict[str, float]:
    try:
        pairs = [word.partition("=") for word in text.split(",") if word.strip()]
        return {name.strip(): float(seconds) for name, _, seconds in pairs}
    except ValueError:
        raise UserError(
            f"{STOP_GRACE_VARIABLE} is {text!r}; give signals and seconds, such as 'SIGTERM=30,SIGUSR2=120'."
        ) from None
