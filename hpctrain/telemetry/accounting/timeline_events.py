"""Order the events of a run in time, and name the categories of its time. Imports no torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from hpctrain.record_types import Event, StepRecord

_Timed = TypeVar("_Timed", Event, StepRecord)

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
    events: Iterable[Event], metrics: Iterable[StepRecord]
) -> tuple[list[TimelineEvent], list[BlockedSpan]]:
    """Return timeline events with times that never decrease, and the spans of saves or pauses."""
    turns: list[TimelineEvent] = []
    steps: list[TimelineEvent] = []
    saves: dict[int, BlockedSpan] = {}
    pauses: list[BlockedSpan] = []
    started_us: dict[int, int] = {}
    for event, time_us in _in_order(events):
        kind, seconds_us = event.kind, microseconds(event.duration_s or 0.0)
        if kind == "checkpoint" and event.step is not None:
            begin_us = time_us - seconds_us
            steps.append(TimelineEvent(begin_us, kind, event.attempt, event.step))
            # A second line for a step refers to the copy, which does not block the training.
            # Without a separate copy of the state, the complete write blocks the training.
            stall_us = seconds_us if event.stall_s is None else microseconds(event.stall_s)
            span = BlockedSpan(begin_us, min(time_us, begin_us + stall_us), event.step)
            saves.setdefault(event.step, span)
        elif kind == "paused":
            pauses.append(BlockedSpan(time_us - seconds_us, time_us, 0, TimeCategory.IDLE))
        elif kind in STATE_CHANGES and (kind != "failure" or event.rank is not None):
            spent = {"loading": seconds_us} if kind == "resumed" else {}
            turns.append(
                TimelineEvent(time_us, kind, event.attempt, event.step, None, spent, bool(event.saved))
            )
            if kind == "started":
                started_us[event.attempt] = time_us
    for record, time_us in _in_order(metrics):
        spent = {name: microseconds(seconds) for name, seconds in record.spent.items()}
        begin_us = max(time_us, started_us.get(record.attempt, 0))
        steps.append(TimelineEvent(begin_us, "step", record.attempt, record.step, record.first_step, spent))
    steps.sort(key=lambda mark: mark.time_us)
    timeline = list(heapq.merge(turns, steps, key=_place))
    return timeline, sorted([*saves.values(), *pauses], key=lambda span: span.start_us)


def _place(event: TimelineEvent) -> tuple[int, float]:
    """Return the place in the order of time; events at the same time follow the phases of an attempt."""
    if event.kind in ("submitted", "started", "resumed"):
        phase = 0.0
    else:
        phase = 0.5 if event.kind in ("step", "checkpoint") else 1.0
    return event.time_us, event.attempt + phase


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _in_order(records: Iterable[_Timed]) -> Iterator[tuple[_Timed, int]]:
    latest = 0
    for record in records:
        latest = max(latest, microseconds(record.time))
        yield record, latest
