"""Record and describe the parts of the start of an attempt."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from hpctrain.cluster.processes import stat_fields
from hpctrain.text import format_duration, format_size, is_finite


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


@dataclass(frozen=True)
class PartDuration:
    """Seconds of a part: the median of the ranks, and the slowest rank with its host."""

    median: float
    max: float
    host: str | None = None


@dataclass(frozen=True)
class StartupDurations:
    seconds: float
    """Time from the start of the attempt to the end of the first step, on the slowest rank."""
    parts: dict[str, PartDuration]
    """By name of the part, in order."""
    slowest_nodes: dict[str, dict[str, float]]
    """Seconds of each part on the slowest nodes: the maximum of their ranks."""

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Self | None:
        """Return the durations in a `startup` event; None if it is damaged."""
        seconds, records, nodes = (event.get(name) for name in ("seconds", "parts", "slowest_nodes"))
        if not (is_finite(seconds) and isinstance(records, dict) and isinstance(nodes, dict)):
            return None
        durations: dict[str, PartDuration] = {}
        for name in filter(records.__contains__, StartupPart):
            record = records[name] if isinstance(records[name], dict) else {}
            if not (is_finite(record.get("median")) and is_finite(record.get("max"))):
                return None
            durations[name.value] = PartDuration(record["median"], record["max"], record.get("host"))
        rows = {str(host): row for host, row in nodes.items() if isinstance(row, dict)}
        if not all(is_finite(value) for row in rows.values() for value in row.values()):
            return None
        return cls(float(seconds), durations, rows)

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """Describe the start in one line: its duration, and the longest parts."""
        inside = [name for name in self.parts if name != StartupPart.JOB]
        longest = sorted(inside, key=lambda name: -self.parts[name].max)[:3]
        shown = ", ".join(f"{name} {format_duration(self.parts[name].max)}" for name in longest)
        return f"the first step ended {format_duration(self.seconds)} after the start ({shown})"


def describe_staging(event: Mapping[str, Any]) -> str | None:
    """Describe a `staged` event in one line; None if it is damaged."""
    size, seconds, reused, saved_s = (event.get(name) for name in ("bytes", "seconds", "reused", "saved_s"))
    if not (is_finite(size) and is_finite(seconds) and is_finite(reused) and is_finite(saved_s)):
        return None
    copies = "1 copy" if reused == 1 else f"{reused} copies"
    saved = f"; {copies} reused, {format_duration(saved_s)} saved"
    return f"staged {format_size(size)} in {format_duration(seconds)}{saved if reused else ''}"


def durations_s(begun: float, ends: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each part of a rank's start, from its end in seconds since the epoch.

    Parts of a standby worker may have ended before the attempt began. They took no time of the attempt.
    """
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
