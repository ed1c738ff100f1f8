"""Assign the time of a run to categories, without gaps or overlaps, from events and metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hpctrain.telemetry.accounting.timeline_events import (
    STATE_CHANGES,
    BlockedSpan,
    TimeCategory,
    TimelineEvent,
)

#: Time of training steps, which becomes lost work if the steps have to be trained again.
_WORK = {
    *(TimeCategory.TRAINING, TimeCategory.COMMUNICATING, TimeCategory.DATA, TimeCategory.VALIDATING),
    TimeCategory.SAVING,
}
#: Categories that the field `spent` of a metrics line can report; the remaining time is training.
CATEGORY_OF_FIELD = {
    "data": TimeCategory.DATA,
    "communication": TimeCategory.COMMUNICATING,
    "validation": TimeCategory.VALIDATING,
}
#: Events between the end of one attempt and the start of the next.
_RESTART_EVENTS = frozenset({"restart", "shrink", "replace", "requeue", "started"})


@dataclass(slots=True)
class Interval:
    """A time span of the training of steps `first` + 1 to `last`, which may still become lost work."""

    start_us: int
    end_us: int
    category: TimeCategory
    attempt: int | None
    first: int
    last: int


class TimeAccountant:
    """Converter of ordered timeline events to intervals without gaps."""

    def __init__(
        self, first: TimelineEvent, end_us: int, blocked: Iterable[BlockedSpan], *, logs_steps: bool
    ) -> None:
        """Start the account at the first event. Lost work is unknown unless the run reports its steps."""
        self.intervals: list[Interval] = []
        self.lost_steps = 0
        self.measured: set[TimeCategory] = set()
        self._now = min(first.time_us - first.spent_us.get("all", 0), end_us)
        self._end, self._logs_steps = end_us, logs_steps
        self._blocked = deque(blocked)
        #: Intervals of work that currently counts, in ascending order of steps.
        self._counted_intervals: list[Interval] = []
        self._attempt: int | None = None
        self._step = 0
        self._first_logged: int | None = None
        #: Category of the time until the next event; None while the ranks train.
        self._phase: TimeCategory | None = TimeCategory.IDLE
        #: True if the ranks have exited and the next event is not yet available.
        self._ranks_ended = False
        #: True until the first step of the attempt is reported.
        self._awaits_first_step = True

    def add_event(self, event: TimelineEvent) -> None:
        """Account for the time up to an event."""
        if event.kind not in ("submitted", "started") and (
            self._attempt is None or event.attempt > self._attempt
        ):
            # Without a supervisor, no `started` event is written.
            self._fill(event.time_us - event.spent_us.get("all", 0), TimeCategory.IDLE)
            self._start(event)
        if event.kind == "resumed":
            self._on_resume(event)
        elif event.kind in STATE_CHANGES:
            self._on_state_change(event)
        elif event.attempt == self._attempt and not self._ranks_ended:
            self._on_step(event)

    def close(self, *, waits: bool) -> None:
        """Account for the time from the last event to the end."""
        if waits:
            self._phase = TimeCategory.QUEUED
        elif self._ranks_ended:
            self._phase = TimeCategory.IDLE
        self._fill(self._end, self._phase or TimeCategory.TRAINING)

    def _start(self, event: TimelineEvent) -> None:
        self._attempt, self._step, self._ranks_ended, self._awaits_first_step = event.attempt, 0, False, True
        self._phase = TimeCategory.STARTING if self._logs_steps else None

    def _on_resume(self, event: TimelineEvent) -> None:
        """Handle a loaded state: work after its step is lost, because these steps are trained again."""
        self._fill(event.time_us - event.spent_us.get("loading", 0), self._phase or TimeCategory.STARTING)
        self._fill(event.time_us, TimeCategory.LOADING)
        self._step, self._phase = event.step or 0, None
        self._mark_lost(self._step)

    def _on_step(self, event: TimelineEvent) -> None:
        """Handle a step, or a checkpoint, which implies a trained step."""
        assert event.step is not None
        if self._awaits_first_step and event.kind == "checkpoint" and event.step == self._step:
            return
        if self._phase is not None:
            self._step = self._entered_at(event.step, event.first_step)
            self._mark_lost(self._step)
        if self._awaits_first_step:
            # If the start time of the steps is not recorded, the steps of ranks that loaded began after the
            # load.
            begun = event.time_us - event.spent_us.get("all", 0 if self._phase else event.time_us)
            self._fill(begun, TimeCategory.STARTING)
            self._phase, self._awaits_first_step = None, False
        spent = {
            category: event.spent_us[name]
            for name, category in CATEGORY_OF_FIELD.items()
            if name in event.spent_us
        }
        self.measured.update(spent)
        first, self._step = self._step, max(self._step, event.step)
        if event.kind == "step" or self._step > first:
            self._work(event.time_us, spent, first, self._step)

    def _entered_at(self, step: int, first_step: int | None) -> int:
        """Return the last step before an attempt with no recorded load, from its first logged step."""
        if first_step is not None:
            return max(0, first_step - 1)
        if self._first_logged is None:
            self._first_logged = step
        done = self._counted_intervals[-1].last if self._counted_intervals else 0
        return 0 if step <= self._first_logged else min(done, step - 1)

    def _on_state_change(self, event: TimelineEvent) -> None:
        kind = event.kind
        if self._ranks_ended:
            category = TimeCategory.RESTARTING if kind in _RESTART_EVENTS else TimeCategory.IDLE
        elif self._phase not in (None, TimeCategory.STARTING):
            category = self._phase or TimeCategory.IDLE
        elif kind in ("started", "submitted"):
            # The job was killed without an event, at the time of its last record or later.
            category = TimeCategory.QUEUED if kind == "started" else TimeCategory.IDLE
        elif self._phase is not None:
            category = self._phase
        elif not self._logs_steps:
            category = TimeCategory.TRAINING
        elif kind == "signal":
            category = TimeCategory.SAVING if event.saved else TimeCategory.TRAINING
        else:
            # Ranks that fail lose the step in progress.
            category = {"failure": TimeCategory.LOST, "finished": TimeCategory.IDLE}.get(
                kind, TimeCategory.RESTARTING
            )
        self._fill(event.time_us, category)
        self._ranks_ended = kind in ("failure", "signal")
        match kind:
            case "started":
                self._start(event)
            case "restart" | "shrink" | "replace":
                self._phase = TimeCategory.RESTARTING
            case "requeue" | "submitted":
                self._phase = TimeCategory.QUEUED
            case "finished":
                self._phase = TimeCategory.IDLE

    def _fill(self, until_us: int, category: TimeCategory) -> None:
        """Account for the time until `until_us`; blocked spans within it keep their category."""
        for start_us, end_us, span in self._segments(until_us):
            self._add(start_us, end_us, category if span is None else span.category, span)

    def _work(self, until_us: int, spent: Mapping[TimeCategory, int], first: int, last: int) -> None:
        """Split the time until `until_us` among the reported categories, except blocked spans."""
        segments = list(self._segments(until_us))
        left = sum(end - start for start, end, span in segments if span is None)
        before: list[tuple[TimeCategory, int]] = []
        after: list[tuple[TimeCategory, int]] = []
        for category, reported_us in spent.items():
            us = min(left, reported_us)
            (after if category is TimeCategory.VALIDATING else before).append((category, us))
            left -= us
        portions = deque([*before, (TimeCategory.TRAINING, left), *after])
        for start, end_us, span in segments:
            if span is not None:
                self._add(start, end_us, span.category, span)
                continue
            while start < end_us:
                category, us = portions.popleft()
                taken = min(us, end_us - start)
                if taken < us:
                    portions.appendleft((category, us - taken))
                if taken:
                    interval = self._add(start, start + taken, category)
                    interval.first, interval.last = first, last
                start += taken

    def _segments(self, until_us: int) -> Iterator[tuple[int, int, BlockedSpan | None]]:
        """Advance to `until_us` and yield the segments between and during blocked spans."""
        until_us = min(until_us, self._end)
        while self._blocked and self._blocked[0].start_us < until_us and self._now < until_us:
            span = self._blocked[0]
            start_us, end_us = max(span.start_us, self._now), min(span.end_us, until_us)
            if self._now < start_us:
                yield self._now, start_us, None
                self._now = start_us
            if start_us < end_us:
                yield start_us, end_us, span
                self._now = end_us
            if span.end_us > until_us:
                break
            self._blocked.popleft()
        if self._now < until_us:
            yield self._now, until_us, None
            self._now = until_us

    def _add(
        self, start_us: int, end_us: int, category: TimeCategory, span: BlockedSpan | None = None
    ) -> Interval:
        step = self._step if span is None else span.step
        interval = Interval(start_us, end_us, category, self._attempt, step, step)
        self.intervals.append(interval)
        if category in _WORK:
            self._counted_intervals.append(interval)
        return interval

    def _mark_lost(self, step: int) -> None:
        """Mark all work after `step` as lost; an interval that contains `step` is split."""
        kept: list[Interval] = []
        if self._counted_intervals:
            self.lost_steps += max(0, self._counted_intervals[-1].last - step)
        while self._counted_intervals and (interval := self._counted_intervals[-1]).last > step:
            self._counted_intervals.pop()
            if interval.first < step:
                share = (interval.end_us - interval.start_us) * (step - interval.first)
                cut_us = interval.start_us + share // (interval.last - interval.first)
                self.intervals.append(
                    Interval(
                        cut_us, interval.end_us, TimeCategory.LOST, interval.attempt, step, interval.last
                    )
                )
                interval.end_us, interval.last = cut_us, step
                kept.append(interval)
            else:
                interval.category = TimeCategory.LOST
        self._counted_intervals += reversed(kept)
