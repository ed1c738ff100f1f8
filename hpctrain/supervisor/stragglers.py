"""Ranks that are slower than the others by themselves: for which the others wait, step after step.

Each rank tells what it spends on data, on computing, and with the others. In a step all take the same time,
so the length of a step says nothing; what a rank spends without the others does.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

#: A rank is slow that takes so many times as long as most,
_SLOW_RATIO = 1.5
#: and longer by such a part of the whole step: of what hardly matters nobody needs to know.
_SLOW_PART = 0.1
#: It is looked at over so many seconds and steps at least; one pause makes no straggler.
WINDOW_S, _WINDOW_STEPS = 20.0, 5
#: Slow in so many windows in a row, it stays so.
LASTING = 3


@dataclass(frozen=True)
class Spent:
    """What a rank has spent since it began to train, in seconds, and its steps."""

    steps: int
    data_s: float
    compute_s: float
    exchange_s: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(
            self.steps - other.steps,
            self.data_s - other.data_s,
            self.compute_s - other.compute_s,
            self.exchange_s - other.exchange_s,
        )

    def per_step(self) -> Spent:
        """The same for one step."""
        count = max(1, self.steps)
        return Spent(1, self.data_s / count, self.compute_s / count, self.exchange_s / count)

    @property
    def own_s(self) -> float:
        """What it took without the others."""
        return self.data_s + self.compute_s


@dataclass(frozen=True)
class Slow:
    """A rank that keeps the others waiting."""

    rank: int
    ratio: float
    """Of what it takes by itself to what most take."""
    part: str
    """Where it loses most: `data` or `compute`."""
    own: Spent
    """A step of its own."""
    typical: Spent
    """A step of most others."""


def slow_ranks(spent: Mapping[int, Spent]) -> list[Slow]:
    """Those of the ranks that are slow, the slowest first.

    Args:
        spent: what each rank has spent over the same stretch.
    """
    steps = {rank: each.per_step() for rank, each in spent.items()}
    if len(steps) < 2:
        return []
    typical = Spent(
        1,
        statistics.median_low(each.data_s for each in steps.values()),
        statistics.median_low(each.compute_s for each in steps.values()),
        statistics.median_low(each.exchange_s for each in steps.values()),
    )
    most_s = max(statistics.median_low(each.own_s for each in steps.values()), 1e-9)
    whole_s = max(each.own_s + each.exchange_s for each in steps.values())
    found = [
        Slow(rank, each.own_s / most_s, _part(each, typical), each, typical)
        for rank, each in steps.items()
        if each.own_s >= _SLOW_RATIO * most_s and each.own_s - most_s >= _SLOW_PART * whole_s
    ]
    return sorted(found, key=lambda slow: -slow.ratio)


def _part(own: Spent, typical: Spent) -> str:
    return "data" if own.data_s - typical.data_s > own.compute_s - typical.compute_s else "compute"


class Stragglers:
    """Follows the ranks of one attempt. Time is handed in, in seconds."""

    def __init__(self, world_size: int, window_s: float = WINDOW_S) -> None:
        self._world_size, self._window_s = world_size, window_s
        self._newest: dict[int, Spent] = {}
        self._window: dict[int, Spent] = {}
        self._begun = 0.0
        self._in_a_row: dict[int, int] = {}

    def heard(self, rank: int, spent: Spent) -> None:
        """A heartbeat has come."""
        if spent.steps > 0:
            self._newest[rank] = spent

    def look(self, now: float) -> list[tuple[Slow, int]]:
        """Ranks that were slow in a window that has just ended, and in how many in a row they were."""
        if len(self._newest) < self._world_size:
            return []
        if not self._window:
            self._window, self._begun = dict(self._newest), now
            return []
        spent = {rank: each - self._window[rank] for rank, each in self._newest.items()}
        if now - self._begun < self._window_s or min(each.steps for each in spent.values()) < _WINDOW_STEPS:
            return []
        self._window, self._begun = dict(self._newest), now
        slow = slow_ranks(spent)
        self._in_a_row = {each.rank: self._in_a_row.get(each.rank, 0) + 1 for each in slow}
        return [(each, self._in_a_row[each.rank]) for each in slow]
