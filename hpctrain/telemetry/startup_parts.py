"""Record and describe the parts of the start of an attempt."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from enum import StrEnum

from hpctrain.cluster.processes import stat_fields
from hpctrain.record_types import Event, PartDuration
from hpctrain.text import format_duration, format_size


class StartupPart(StrEnum):
    """A part of the start of an attempt. Each part begins at the end of the part before it."""

    JOB = "job"
    LAUNCH = "launch"
    INTERPRETER = "interpreter"
    WORKER = "worker"
    IMPORTS = "imports"
    STORE = "store"
    GROUP = "process group"
    SETUP = "set-up"
    DATA = "first batch"
    STEP = "first step"


#: Description of each part, for the report.
PART_TEXT = {
    StartupPart.JOB: "Slurm's prolog, the batch script, the supervisor and staging",
    StartupPart.LAUNCH: "srun, until it starts the process of the rank",
    StartupPart.INTERPRETER: "starting Python",
    StartupPart.WORKER: "hpctrain, up to the first line of the script",
    StartupPart.IMPORTS: "the script, up to the start of training",
    StartupPart.STORE: "connecting to the rendezvous store, and choosing a device",
    StartupPart.GROUP: "creating the process group",
    StartupPart.SETUP: "preparing the model, and loading a checkpoint",
    StartupPart.DATA: "waiting for the first batch",
    StartupPart.STEP: "the first step; without a Trainer, everything from the first line of the script",
}


def describe_startup(seconds: float | None, parts: Mapping[str, PartDuration] | None) -> str:
    """Describe in one line the start until the end of the first step: its duration, and the longest parts."""
    slowest = {name: part.max for name, part in (parts or {}).items() if name != StartupPart.JOB}
    longest = sorted(slowest, key=lambda name: -slowest[name])[:3]
    shown = ", ".join(f"{name} {format_duration(slowest[name])}" for name in longest)
    return f"the first step ended {format_duration(seconds)} after the start ({shown})"


def describe_staging(event: Event) -> str:
    """Describe a `staged` event in one line."""
    copies = "1 copy" if event.reused == 1 else f"{event.reused} copies"
    saved = f"; {copies} reused, {format_duration(event.saved_s)} saved" if event.reused else ""
    return f"staged {format_size(event.num_bytes)} in {format_duration(event.duration_s)}{saved}"


def durations_s(begun: float, ends: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each part of a rank's start, without those before the attempt began."""
    spent: dict[str, float] = {}
    for part in StartupPart:
        if part in ends:
            end = max(begun, ends[part])
            spent[part.value], begun = round(end - begun, 3), end
    return spent


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
        return launch | {name.value: round(end, 3) for name, end in self._ends.items()}


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
