"""Find slow ranks that make the others wait at each step.

Each rank reports its time for data, for computing, and for exchange with the others. All ranks need the same
time for a step, so step durations do not show stragglers. The time outside the exchange does.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

#: A rank is slow if its time is this multiple of the typical time,
_SLOW_RATIO = 1.5
#: and is longer by this fraction of the step, which excludes negligible differences.
_SLOW_PART = 0.1
#: Minimum length of a window in seconds and in measured steps; one pause does not make a straggler.
_WINDOW_S, _WINDOW_STEPS = 20.0, 5
#: Number of consecutive slow windows after which a rank counts as a lasting straggler.
LASTING_WINDOWS = 3


class StepTimes(NamedTuple):
    """Times of a rank since it began to train, in seconds, and its number of steps."""

    steps: int
    data_s: float
    compute_s: float
    exchange_s: float
    timed_steps: int
    """Steps that the times of computing and exchange contain: on a GPU, measurements arrive later."""
    measured_steps: int

    def since(self, earlier: StepTimes) -> StepTimes:
        return StepTimes(*map(operator.sub, self, earlier))

    def per_step(self) -> StepTimes:
        timed = max(1, self.timed_steps)
        data_s = self.data_s / max(1, self.steps)
        return StepTimes(1, data_s, self.compute_s / timed, self.exchange_s / timed, 1, 1)

    def by_part(self) -> dict[str, float]:
        return {name: round(getattr(self, f"{name}_s"), 6) for name in ("data", "compute", "exchange")}

    @property
    def own_time_s(self) -> float:
        return self.data_s + self.compute_s


@dataclass(frozen=True)
class Straggler:
    """A slow rank that makes the others wait."""

    rank: int
    ratio: float
    """Ratio of its time to the typical time of the ranks."""
    part: str
    """Part in which the rank loses the most time: `data` or `compute`."""
    own_times: StepTimes
    typical_times: StepTimes


def find_stragglers(times: Mapping[int, StepTimes]) -> list[Straggler]:
    """Return the slow ranks, slowest first, from the times of each rank over the same period."""
    steps = {rank: total.per_step() for rank, total in times.items()}
    if len(steps) < 2:
        return []

    def median(name: str) -> float:
        return float(statistics.median_low(getattr(step, name) for step in steps.values()))

    typical = StepTimes(1, median("data_s"), median("compute_s"), median("exchange_s"), 1, 1)
    typical_s = max(median("own_time_s"), 1e-9)
    longest_s = max(step.own_time_s + step.exchange_s for step in steps.values())
    stragglers = []
    for rank, step in steps.items():
        is_slow = step.own_time_s >= _SLOW_RATIO * typical_s
        if is_slow and step.own_time_s - typical_s >= _SLOW_PART * longest_s:
            is_data = step.data_s - typical.data_s > step.compute_s - typical.compute_s
            part = "data" if is_data else "compute"
            stragglers.append(Straggler(rank, step.own_time_s / typical_s, part, step, typical))
    return sorted(stragglers, key=lambda straggler: -straggler.ratio)


class StragglerDetector:
    """Tracks the ranks of one attempt. The caller passes the time, in seconds."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._newest: dict[int, StepTimes] = {}
        self._window: dict[int, StepTimes] = {}
        self._window_start = 0.0
        self._in_a_row: dict[int, int] = {}
        self._ignored: dict[int, int] = {}

    def on_heartbeat(self, rank: int, spent: StepTimes) -> None:
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
        times = {rank: newest.since(self._window[rank]) for rank, newest in self._newest.items()}
        num_measured = min(total.measured_steps for total in times.values())
        if now - self._window_start < _WINDOW_S or num_measured < _WINDOW_STEPS:
            return []
        self._window, self._window_start = dict(self._newest), now
        stragglers = find_stragglers(times)
        self._in_a_row = {slow.rank: self._in_a_row.get(slow.rank, 0) + 1 for slow in stragglers}
        return [(slow, self._in_a_row[slow.rank]) for slow in stragglers]
