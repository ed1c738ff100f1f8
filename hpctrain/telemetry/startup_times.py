"""Times at which the parts of this rank's start ended, for the report of the run."""

from __future__ import annotations

import os
import time

from hpctrain.cluster.processes import stat_fields
from hpctrain.telemetry.startup_parts import StartupPart


class StartupTimes:
    """Times at which the parts of this rank's start ended, in seconds since the epoch."""

    def __init__(self) -> None:
        self._ends: dict[StartupPart, float] = {}

    def end(self, part: StartupPart) -> None:
        """Record the end of a part. Only the first call for a part counts."""
        self._ends.setdefault(part, time.time())

    def report(self) -> dict[str, float] | None:
        """Return the times after the first step, otherwise None."""
        if StartupPart.STEP not in self._ends:
            return None
        created = _creation_time()
        launch = {} if created is None else {StartupPart.LAUNCH.value: created}
        return launch | {part.value: round(end, 3) for part, end in self._ends.items()}


def _creation_time() -> float | None:
    """Return the time at which this process was created; None if the system does not report it."""
    try:
        ticks = int(stat_fields("self")[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None
    return round(time.time() - age_s, 3)


#: The times of this process.
startup_times = StartupTimes()
