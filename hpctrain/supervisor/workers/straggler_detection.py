"""Straggler detection: finds slow ranks that make the others wait at each step.

Each rank reports its time for data, for computing, and for exchange with the others. All ranks need the same
time for a step, so step durations do not show stragglers. The time outside the exchange does.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields

#: A rank is slow if its time is this multiple of the typical time,
_SLOW_RATIO = 1.5
#: and is longer by this fraction of the step, which excludes negligible differences.
_SLOW_PART = 0.1
#: Minimum length of a window in seconds and in measured steps; one pause does not make a straggler.
WINDOW_S, _WINDOW_STEPS = 20.0, 5
#: Number of consecutive slow windows after which a rank counts as a lasting straggler.
LASTING_WINDOWS = 3


@dataclass(frozen=True)
class StepTimes:
    """Times of a rank since it began to train, in seconds, and its number of steps."""

    steps: int
    data_s: float
    compute_s: float
    exchange_s: float
    timed_steps: int
    """Steps that the times of computing and exchange contain: on a GPU, measurements arrive later."""
    measured_steps: int
    """The measured ones of these steps."""

    def __sub__(self, other: StepTimes) -> StepTimes:
        return StepTimes(*(getattr(self, name) - getattr(other, name) for name in _FIELDS))

    def per_step(self) -> StepTimes:
        """Return the averages per step."""
        timed = max(1, self.timed_steps)
        data_s = self.data_s / max(1, self.steps)
        return StepTimes(1, data_s, self.compute_s / timed, self.exchange_s / timed, 1, 1)

    @property
    def own_time_s(self) -> float:
        """Time without the exchange."""
        return self.data_s + self.compute_s


_FIELDS = tuple(entry.name for entry in fields(StepTimes))


@dataclass(frozen=True)
class Straggler:
    """A slow rank that makes the others wait."""

    rank: int
    ratio: float
    """Ratio of its time to the typical time of the ranks."""
    part: str
    """Part in which the rank loses the most time: `data` or `compute`."""
    own_times: StepTimes
    """Average step of this rank."""
    typical_times: StepTimes
    """Typical step of the ranks."""


def find_stragglers(spent: Mapping[int, StepTimes]) -> list[Straggler]:
    """Return the slow ranks, slowest first."""
    steps = {rank: each.per_step() for rank, each in spent.items()}
    if len(steps) < 2:
        return []
    typical = StepTimes(
        1,
        statistics.median_low(each.data_s for each in steps.values()),
        statistics.median_low(each.compute_s for each in steps.values()),
        statistics.median_low(each.exchange_s for each in steps.values()),
        1,
        1,
    )
    most_s = max(statistics.median_low(each.own_time_s for each in steps.values()), 1e-9)
    whole_s = max(each.own_time_s + each.exchange_s for each in steps.values())
    found = [
        Straggler(rank, each.own_time_s / most_s, _part(each, typical), each, typical)
        for rank, each in steps.items()
        if each.own_time_s >= _SLOW_RATIO * most_s and each.own_time_s - most_s >= _SLOW_PART * whole_s
    ]
    return sorted(found, key=lambda straggler: -straggler.ratio)


def _part(own: StepTimes, typical: StepTimes) -> str:
    return "data" if own.data_s - typical.data_s > own.compute_s - typical.compute_s else "compute"


class StragglerDetector:
    """Tracks the ranks of one attempt. The caller passes the time, in seconds."""

    def __init__(self, world_size: int, window_s: float = WINDOW_S) -> None:
        self._world_size, self._window_s = world_size, window_s
        self._newest: dict[int, StepTimes] = {}
        self._window: dict[int, StepTimes] = {}
        self._window_start = 0.0
        self._in_a_row: dict[int, int] = {}
        self._ignored: dict[int, int] = {}

    def on_heartbeat(self, rank: int, spent: StepTimes) -> None:
        """Handle a heartbeat."""
        if spent.measured_steps > self._ignored.get(rank, 0):
            self._newest[rank] = spent

    def restart(self) -> None:
        """Discard the current window, and the steps that a pause of the ranks has interrupted."""
        self._ignored |= {rank: spent.measured_steps + 1 for rank, spent in self._newest.items()}
        self._newest, self._window = {}, {}

    def check_window(self, now: float) -> list[tuple[Straggler, int]]:
        """Return the slow ranks of a window that has just ended, with their consecutive slow windows."""
        if len(self._newest) < self._world_size:
            return []
        if not self._window:
            self._window, self._window_start = dict(self._newest), now
            return []
        spent = {rank: each - self._window[rank] for rank, each in self._newest.items()}
        if (
            now - self._window_start < self._window_s
            or min(each.measured_steps for each in spent.values()) < _WINDOW_STEPS
        ):
            return []
        self._window, self._window_start = dict(self._newest), now
        slow = find_stragglers(spent)
        self._in_a_row = {each.rank: self._in_a_row.get(each.rank, 0) + 1 for each in slow}
        return [(each, self._in_a_row[each.rank]) for each in slow]
