"""What a run has written down, as moments in their order: the ground of its ledger. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

#: Events after which the ranks of an attempt do not go on as they did.
TURNS = frozenset(
    {
        *("submitted", "started", "resumed", "signal", "failure"),
        *("restart", "shrink", "replace", "requeue", "finished"),
    }
)

#: JSON knows whole numbers that no float can hold, and Python's JSON infinity and not-a-number besides.
_LARGEST = sys.float_info.max


@dataclass(slots=True)
class Mark:
    """Something that happened at a moment, in microseconds since the epoch."""

    time_us: int
    kind: str
    """An event's, or `step`."""
    attempt: int
    step: int | None = None
    """How many steps are done by now, where that is known."""
    spent_us: dict[str, int] = field(default_factory=dict)
    """What the time before was spent on, as far as the record tells."""
    saved: bool = False
    """Whether ranks that agreed to stop have saved."""


@dataclass(frozen=True)
class Save:
    """A stretch of time in which a save held up the training, in microseconds since the epoch."""

    start_us: int
    end_us: int
    step: int


def read_marks(
    events: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]]
) -> tuple[list[Mark], list[Save]]:
    """Moments in their order, and when saves held up the training.

    What has no usable time is passed over. Each file is in the order in which it was written; a time that
    lies before the one above it, as clocks of two hosts may have it, counts as that one.
    """
    turns: list[Mark] = []
    steps: list[Mark] = []
    saves: dict[int, Save] = {}
    started_us: dict[int, int] = {}
    for event, time_us in _in_order(events):
        kind, attempt, step = str(event.get("kind")), _count(event.get("attempt")), event.get("step")
        known_step = step if _is_count(step) else None
        seconds_us = microseconds(event.get("seconds")) or 0
        if kind == "checkpoint" and known_step is not None:
            steps.append(Mark(time_us - seconds_us, kind, attempt, known_step))
            # A second line about a step is of its copy, which is made while the training goes on.
            saves.setdefault(known_step, _save(event, time_us, seconds_us, known_step))
        elif kind in TURNS and (kind != "failure" or is_finite(event.get("rank"))):
            spent = {"loading": seconds_us} if kind == "resumed" else {}
            turns.append(Mark(time_us, kind, attempt, known_step, spent, event.get("saved") is True))
            if kind == "started":
                started_us[attempt] = time_us
    for record, time_us in _in_order(metrics):
        if _is_count(step := record.get("step")):
            attempt = _count(record.get("attempt"))
            time_us = max(time_us, started_us.get(attempt, 0))
            steps.append(Mark(time_us, "step", attempt, step, _spent(record.get("spent"))))
    steps.sort(key=lambda mark: mark.time_us)
    return list(_merged(turns, steps)), sorted(saves.values(), key=lambda save: save.start_us)


def _merged(turns: list[Mark], steps: list[Mark]) -> Iterator[Mark]:
    """Both in the order of time; what happens at once, in that of an attempt's life."""
    done = 0
    for turn in turns:
        begins = turn.kind in ("submitted", "started", "resumed")
        while done < len(steps) and (
            steps[done].time_us < turn.time_us
            or (steps[done].time_us == turn.time_us and steps[done].attempt < turn.attempt + (not begins))
        ):
            yield steps[done]
            done += 1
        yield turn
    yield from steps[done:]


def microseconds(seconds: object) -> int | None:
    """Whole microseconds; None where that is no time that a clock could show."""
    # Python's calendar ends with the year 9999.
    if not is_finite(seconds) or not 0 <= seconds < 253_402_300_800:
        return None
    return round(seconds * 1e6)


def _in_order(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], int]]:
    latest = 0
    for record in records:
        if (time_us := microseconds(record.get("time"))) is not None:
            latest = max(latest, time_us)
            yield record, latest


def _save(event: Mapping[str, Any], time_us: int, seconds_us: int, step: int) -> Save:
    """How long the training stood still: for the copy of the state, or, without one, until it was written."""
    begun = time_us - seconds_us
    stall_us = microseconds(event.get("stall_s"))
    return Save(begun, min(time_us, begun + (seconds_us if stall_us is None else stall_us)), step)


def _spent(spent: object) -> dict[str, int]:
    if not isinstance(spent, Mapping):
        return {}
    return {str(name): us for name, value in spent.items() if (us := microseconds(value)) is not None}


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value of a JSON file is a number that a clock or a chart could show."""
    kind = type(value)
    return (kind is float or kind is int) and -_LARGEST <= value <= _LARGEST  # type: ignore[operator]


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**53


def _count(value: object) -> int:
    return value if _is_count(value) else 0
