"""When a run hangs: no rank gets anything done for longer than this run has ever taken.

Ranks wait for each other, so one that is stuck stops all; and one that is slow, in a save perhaps, lets all
others wait with reason. So what counts is that no rank gets on, for longer than the most patient phase that
one of them is in allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

#: A phase may take so many times as long as it ever has in this run.
_TIMES_LONGEST = 10.0
#: A rank says every second that it is there, every ten where there are ten thousand. One that says nothing
#: for so long is stuck or starved, and where it was last heard in says nothing of where it is.
_SILENT_S = 30.0
#: And so many times the floor anyway: what has not been seen yet may take long. `start` is the script's own
#: until a training begins, of which nothing is known beforehand; `first` is the first step, which compiles
#: perhaps.
_FLOORS = {
    "start": math.inf,
    "load": 6.0,
    "first": 6.0,
    "data": 1.0,
    "step": 1.0,
    "validate": 4.0,
    "save": 12.0,
    "end": math.inf,
}


@dataclass
class Limits:
    """How long a rank may get nothing done, by phase."""

    floor_s: float | None
    """The least of all limits; None for no limit at all."""
    longest_s: dict[str, float] = field(default_factory=dict)
    """How long each phase has taken at most in this run."""

    def of(self, phase: str) -> float:
        """Seconds."""
        if self.floor_s is None or phase == "end":
            return math.inf
        longest = self.longest_s.get(phase)
        if longest is None:
            return self.floor_s * _FLOORS.get(phase, math.inf)
        floor = 6.0 if phase == "start" else _FLOORS.get(phase, math.inf)
        return max(self.floor_s * floor, longest * _TIMES_LONGEST)

    def learn(self, phase: str, seconds: float) -> None:
        """A rank was so long in a phase before it got on."""
        self.longest_s[phase] = max(seconds, self.longest_s.get(phase, 0.0))


@dataclass
class RankState:
    """What is known of a rank that is on the line."""

    phase: str = "start"
    step: int = 0
    beats: int = -1
    since: float = 0.0
    """When it last got something done."""
    heard: float = 0.0
    """When it last said anything."""

    @property
    def limited_as(self) -> str:
        """The phase whose limit counts."""
        return "first" if self.phase in ("step", "data") and self.step == 0 else self.phase


@dataclass(frozen=True)
class Overdue:
    """No rank has got anything done for too long."""

    seconds: float
    limit_s: float


class Liveness:
    """Follows the ranks of one attempt. Time is handed in, in seconds."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.ranks: dict[int, RankState] = {}

    def heard(self, rank: int, phase: str, step: int, beats: int, now: float) -> None:
        """A heartbeat has come."""
        state = self.ranks.get(rank)
        if state is None:
            self.ranks[rank] = RankState(phase, step, beats, now, now)
        elif beats != state.beats:
            self.limits.learn(state.limited_as, now - state.since)
            self.ranks[rank] = RankState(phase, step, beats, now, now)

    def alive(self, rank: int, now: float) -> None:
        """A rank has said something, perhaps nothing new."""
        if (state := self.ranks.get(rank)) is not None:
            state.heard = now

    def gone(self, rank: int) -> None:
        """A rank has ended."""
        self.ranks.pop(rank, None)

    def paused(self, seconds: float) -> None:
        """Nobody could run meanwhile, not even the one who looks: as when the job was suspended."""
        for state in self.ranks.values():
            state.since += seconds
            state.heard += seconds

    def overdue(self, now: float) -> Overdue | None:
        """Whether the attempt hangs.

        What a rank that says nothing did last does not prolong the limit, where others tell what they do.
        """
        if not self.ranks:
            return None
        states = self.ranks.values()
        speaking = [state for state in states if now - state.heard < _SILENT_S] or states
        seconds = now - max(state.since for state in states)
        limit_s = max(self.limits.of(state.limited_as) for state in speaking)
        return Overdue(seconds, limit_s) if seconds > limit_s else None


@dataclass(frozen=True)
class Told:
    """What a rank of a hung attempt says of itself."""

    phase: str
    step: int
    place: str
    """The user's innermost line, as `training_step (train.py:12)`."""
    waits: bool
    """Whether it waits for other ranks."""


def absent(told: Mapping[int, Told], silent: list[int]) -> list[int]:
    """The ranks that the others wait for; none where that cannot be told.

    In this order: ranks that do not even answer, that are steps behind, that do not wait while others do, and
    that are somewhere else than most.

    Args:
        told: what those ranks say that answered.
        silent: ranks that did not.
    """
    if silent and told:
        return sorted(silent)
    newest = max((one.step for one in told.values()), default=0)
    if behind := [rank for rank, one in told.items() if one.step < newest]:
        return sorted(behind)
    busy = [rank for rank, one in told.items() if not one.waits]
    if 0 < len(busy) < len(told):
        return sorted(busy)
    places = [one.place for one in told.values()]
    most = max(places, key=places.count, default="")
    if 2 * places.count(most) > len(places):
        return sorted(rank for rank, one in told.items() if one.place != most)
    return []
