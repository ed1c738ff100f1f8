"""Detect hangs: no rank makes progress for longer than any earlier phase of this run.

One stuck rank blocks all ranks, but so does a slow rank, such as during a save. The attempt hangs if no rank
makes progress for longer than the longest limit of the ranks' current phases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.record_types import RankPhase, RankSnapshot

#: Limit of a phase, as a multiple of its longest duration in this run.
_DURATION_FACTOR = 10.0
#: A rank sends a message every second, or every ten seconds with ten thousand ranks. A rank that is silent
#: for this many seconds is stuck or starved, and its last reported phase is outdated.
_SILENT_S = 30.0
#: Seconds between two searches for silent ranks.
_CHECK_INTERVAL_S = 1.0
#: Minimum limit of each phase, as a multiple of the floor, because an unseen phase may be long. In `start`
#: and `script` a rank that computes or prints makes progress (`runtime/program/script_monitor.py`). `first`
#: is the first step, which may compile.
_FLOORS: dict[str, float] = {
    RankPhase.START: 6.0,
    RankPhase.JOIN: 1.0,
    RankPhase.SCRIPT: 1.0,
    RankPhase.LOAD: 6.0,
    RankPhase.FIRST: 6.0,
    RankPhase.DATA: 1.0,
    RankPhase.STEP: 1.0,
    RankPhase.VALIDATE: 4.0,
    RankPhase.SAVE: 12.0,
    RankPhase.END: math.inf,
}
#: Minimum limit without an optimizer step for a script whose ranks are busy, as a multiple of the floor. The
#: script may be evaluating, but may also be in an endless loop.
_NO_STEP_FLOOR = 12.0
#: Key of the longest time between two steps of a script.
_STEP_GAP = "step gap"


@dataclass
class PhaseLimits:
    """Time limits without progress, by phase."""

    floor_s: float | None
    """Lower bound of all limits in seconds; None disables the limits."""
    max_duration_s: dict[str, float] = field(default_factory=dict)

    def limit_s(self, phase: str) -> float:
        if self.floor_s is None or phase == RankPhase.END:
            return math.inf
        floor = _NO_STEP_FLOOR if phase == _STEP_GAP else _FLOORS.get(phase, math.inf)
        return max(self.floor_s * floor, self.max_duration_s.get(phase, 0.0) * _DURATION_FACTOR)

    def record(self, phase: str, seconds: float) -> None:
        self.max_duration_s[phase] = max(seconds, self.max_duration_s.get(phase, 0.0))


@dataclass
class RankProgress:
    phase: str = RankPhase.START
    step: int = 0
    progress_count: int = -1
    since: float = 0.0
    """Time of the last progress."""
    last_message_at: float = 0.0
    last_step_at: float = 0.0

    @property
    def limit_phase(self) -> str:
        is_first = self.step == 0 and self.phase in (RankPhase.STEP, RankPhase.DATA)
        return RankPhase.FIRST if is_first else self.phase


@dataclass(frozen=True)
class HangInfo:
    seconds: float
    limit_s: float


class HangDetector:
    """Tracks the ranks of one attempt, which starts `now`. The caller passes the time, in seconds.

    Ranks that never connect count as stuck only if ranks of an earlier attempt have connected, because some
    programs send no messages.
    """

    def __init__(self, limits: PhaseLimits, now: float) -> None:
        self.limits = limits
        self.ranks: dict[int, RankProgress] = {}
        #: Start of the attempt, until the first rank connects.
        self._waiting_since: float | None = now
        self._checked_at, self._has_silent = -math.inf, False

    def on_heartbeat(self, rank: int, phase: str, step: int, progress_count: int, now: float) -> None:
        if self._waiting_since is not None:
            self.limits.record(RankPhase.START, now - self._waiting_since)
            self._waiting_since = None
        state = self.ranks.get(rank)
        if state is None:
            self.ranks[rank] = RankProgress(phase, step, progress_count, now, now, now)
        elif progress_count != state.progress_count:
            # A rank waits for suspended ranks, which are silent.
            if not self._is_any_silent(now):
                self.limits.record(state.limit_phase, now - state.since)
            last_step_at = now if step != state.step else state.last_step_at
            if step != state.step and phase == state.phase == RankPhase.SCRIPT:
                self.limits.record(_STEP_GAP, now - state.last_step_at)
            self.ranks[rank] = RankProgress(phase, step, progress_count, now, now, last_step_at)

    def _is_any_silent(self, now: float) -> bool:
        """Return true if a rank is silent; searches thousands of ranks at most once per interval."""
        if now - self._checked_at >= _CHECK_INTERVAL_S:
            self._checked_at = now
            self._has_silent = any(now - state.last_message_at >= _SILENT_S for state in self.ranks.values())
        return self._has_silent

    def on_message(self, rank: int, now: float) -> None:
        if (state := self.ranks.get(rank)) is not None:
            state.last_message_at = now

    def discount_pause(self, seconds: float) -> None:
        """Discount a pause of both the ranks and the supervisor, such as a suspended job."""
        for state in self.ranks.values():
            state.since += seconds
            state.last_message_at += seconds
            state.last_step_at += seconds
        if self._waiting_since is not None:
            self._waiting_since += seconds

    def find_hang(self, now: float) -> HangInfo | None:
        if self._waiting_since is not None and RankPhase.START in self.limits.max_duration_s:
            seconds, limit_s = now - self._waiting_since, self.limits.limit_s(RankPhase.START)
            return HangInfo(seconds, limit_s) if seconds > limit_s else None
        if not self.ranks:
            return None
        states = self.ranks.values()
        speaking = [state for state in states if now - state.last_message_at < _SILENT_S] or states
        seconds = now - max(state.since for state in states)
        limit_s = max(self.limits.limit_s(state.limit_phase) for state in speaking)
        if seconds <= limit_s and all(state.phase == RankPhase.SCRIPT for state in speaking):
            # Busy ranks without steps.
            seconds = now - max(state.last_step_at for state in states)
            limit_s = self.limits.limit_s(_STEP_GAP)
        return HangInfo(seconds, limit_s) if seconds > limit_s else None


def blocking_ranks(snapshots: Mapping[int, RankSnapshot], silent: list[int]) -> list[int]:
    """Return the ranks that the others wait for, or the only rank; empty if unknown.

    They do not respond, are steps behind, do not wait while others wait, or are elsewhere than most.
    """
    if len(ranks := [*snapshots, *silent]) == 1:
        return ranks
    if silent and snapshots:
        return sorted(silent)
    newest = max((snapshot.step for snapshot in snapshots.values()), default=0)
    if behind := [rank for rank, snapshot in snapshots.items() if snapshot.step < newest]:
        return sorted(behind)
    busy = [rank for rank, snapshot in snapshots.items() if not snapshot.waits]
    if 0 < len(busy) < len(snapshots):
        return sorted(busy)
    places = [snapshot.place for snapshot in snapshots.values()]
    majority = max(places, key=places.count, default="")
    if 2 * places.count(majority) > len(places):
        return sorted(rank for rank, snapshot in snapshots.items() if snapshot.place != majority)
    return []
