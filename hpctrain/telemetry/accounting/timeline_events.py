"""Order the events of a run in time, and name the categories of its time. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeGuard

from hpctrain.text import is_finite

#: Events after which the state of an attempt's ranks changes.
STATE_CHANGES = frozenset(
    {
        *("submitted", "started", "resumed", "signal", "failure"),
        *("restart", "shrink", "replace", "requeue", "finished"),
    }
)


class TimeCategory(StrEnum):
    TRAINING = "training"
    COMMUNICATING = "communicating"
    DATA = "waiting for data"
    VALIDATING = "validating"
    SAVING = "saving"
    LOADING = "loading"
    STARTING = "starting"
    RESTARTING = "restarting"
    LOST = "lost work"
    QUEUED = "queued"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A span of a run's time, in microseconds since the epoch; the end is exclusive."""

    start_us: int
    end_us: int
    category: TimeCategory
    attempt: int | None
    """The attempt during or before this span; None before the first attempt."""


@dataclass(slots=True)
class TimelineEvent:
    """An event at a time, in microseconds since the epoch."""

    time_us: int
    kind: str
    """The kind of an event in `events.jsonl`, or `step`."""
    attempt: int
    step: int | None = None
    """Number of completed steps, if known."""
    first_step: int | None = None
    """The first step of an attempt with this record, if it is recorded."""
    spent_us: dict[str, int] = field(default_factory=dict)
    """Microseconds before this event by category, as far as recorded."""
    saved: bool = False
    """True if ranks that agreed to stop have saved."""


@dataclass(frozen=True)
class BlockedSpan:
    """A span in which a save or a pause blocked training, in microseconds since the epoch."""

    start_us: int
    end_us: int
    step: int
    category: TimeCategory = TimeCategory.SAVING


def read_timeline_events(
    events: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]]
) -> tuple[list[TimelineEvent], list[BlockedSpan]]:
    """Return timeline events in order, and the spans in which saves or pauses blocked training.

    Records without a usable time are skipped. The lines of each file are in the order of writing. A time
    before the previous line, such as from unsynchronized host clocks, is replaced with the previous time.
    """
    turns: list[TimelineEvent] = []
    steps: list[TimelineEvent] = []
    saves: dict[int, BlockedSpan] = {}
    pauses: list[BlockedSpan] = []
    started_us: dict[int, int] = {}
    for event, time_us in _in_order(events):
        kind, attempt, step = str(event.get("kind")), _count(event.get("attempt")), event.get("step")
        known_step = step if _is_count(step) else None
        seconds_us = microseconds(event.get("seconds")) or 0
        if kind == "checkpoint" and known_step is not None:
            steps.append(TimelineEvent(time_us - seconds_us, kind, attempt, known_step))
            # A second line for a step refers to the copy, which does not block the training.
            stall_us = microseconds(event.get("stall_s"))
            # Without a separate copy of the state, the complete write blocks the training.
            end_us = min(time_us, time_us - seconds_us + (seconds_us if stall_us is None else stall_us))
            saves.setdefault(known_step, BlockedSpan(time_us - seconds_us, end_us, known_step))
        elif kind == "paused":
            pauses.append(BlockedSpan(time_us - seconds_us, time_us, 0, TimeCategory.IDLE))
        elif kind in STATE_CHANGES and (kind != "failure" or is_finite(event.get("rank"))):
            spent = {"loading": seconds_us} if kind == "resumed" else {}
            turns.append(
                TimelineEvent(time_us, kind, attempt, known_step, None, spent, event.get("saved") is True)
            )
            if kind == "started":
                started_us[attempt] = time_us
    for record, time_us in _in_order(metrics):
        if _is_count(step := record.get("step")):
            attempt = _count(record.get("attempt"))
            time_us = max(time_us, started_us.get(attempt, 0))
            first_logged = record.get("first_step")
            first_step = first_logged if _is_count(first_logged) else None
            steps.append(
                TimelineEvent(time_us, "step", attempt, step, first_step, _spent(record.get("spent")))
            )
    steps.sort(key=lambda mark: mark.time_us)
    return list(_merged(turns, steps)), sorted([*saves.values(), *pauses], key=lambda span: span.start_us)


def _merged(turns: list[TimelineEvent], steps: list[TimelineEvent]) -> Iterator[TimelineEvent]:
    """Merge both in order of time; events at the same time are in the order of an attempt's phases."""
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
    """Return whole microseconds; None if the value is not a valid time."""
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


def _spent(spent: object) -> dict[str, int]:
    if not isinstance(spent, Mapping):
        return {}
    return {str(name): us for name, value in spent.items() if (us := microseconds(value)) is not None}


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**53


def _count(value: object) -> int:
    return value if _is_count(value) else 0
