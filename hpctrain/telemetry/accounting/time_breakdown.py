"""Break down the time of a run by category, and compute its goodput. Every microsecond counts once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from hpctrain.record_types import Event, StepRecord
from hpctrain.telemetry.accounting.timeline_events import (
    STATE_CHANGES,
    BlockedSpan,
    TimeCategory,
    TimelineEvent,
    TimeSpan,
    microseconds,
    read_timeline_events,
)
from hpctrain.text import is_finite

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


NO_STEPS_NOTE = (
    "No steps are reported, so all time between the start and the end of the ranks counts as training, and "
    "lost work is unknown."
)
#: Categories that are known without reported steps.
_WITHOUT_STEPS = frozenset(
    {TimeCategory.TRAINING, TimeCategory.RESTARTING, TimeCategory.QUEUED, TimeCategory.IDLE}
)
#: Time of the steps that were not repeated.
STEP_CATEGORIES = (TimeCategory.TRAINING, TimeCategory.COMMUNICATING, TimeCategory.DATA)


@dataclass(slots=True)
class _Interval:
    """A time span of the training of the steps after `from_step` to `last_step`, which may be lost later."""

    start_us: int
    end_us: int
    category: TimeCategory
    attempt: int | None
    from_step: int
    last_step: int


class _TimeAccountant:
    """Converter of ordered timeline events to intervals without gaps."""

    def __init__(
        self, start: TimelineEvent, end_us: int, blocked: Iterable[BlockedSpan], *, logs_steps: bool
    ) -> None:
        """Start the account at the first event. Lost work is unknown unless the run reports its steps."""
        self.intervals: list[_Interval] = []
        self.lost_steps = 0
        self.measured: set[TimeCategory] = set()
        self._now = min(start.time_us - start.spent_us.get("all", 0), end_us)
        self._end, self._logs_steps = end_us, logs_steps
        self._blocked = deque(blocked)
        #: Intervals of work that currently counts, in ascending order of steps.
        self._counted_intervals: list[_Interval] = []
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
        before, self._step = self._step, max(self._step, event.step)
        if event.kind == "step" or self._step > before:
            self._work(event.time_us, spent, before, self._step)

    def _entered_at(self, step: int, first_step: int | None) -> int:
        """Return the last step before an attempt whose load is not recorded."""
        if first_step is not None:
            return max(0, first_step - 1)
        if self._first_logged is None:
            self._first_logged = step
        done = self._counted_intervals[-1].last_step if self._counted_intervals else 0
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

    def _work(self, until_us: int, spent: Mapping[TimeCategory, int], from_step: int, last_step: int) -> None:
        """Split the time until `until_us` among the reported categories, except blocked spans."""
        segments = list(self._segments(until_us))
        remaining_us = sum(end - start for start, end, span in segments if span is None)
        before: list[tuple[TimeCategory, int]] = []
        after: list[tuple[TimeCategory, int]] = []
        for category, reported_us in spent.items():
            us = min(remaining_us, reported_us)
            (after if category is TimeCategory.VALIDATING else before).append((category, us))
            remaining_us -= us
        portions = deque([*before, (TimeCategory.TRAINING, remaining_us), *after])
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
                    interval.from_step, interval.last_step = from_step, last_step
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
    ) -> _Interval:
        step = self._step if span is None else span.step
        interval = _Interval(start_us, end_us, category, self._attempt, step, step)
        self.intervals.append(interval)
        if category in _WORK:
            self._counted_intervals.append(interval)
        return interval

    def _mark_lost(self, step: int) -> None:
        """Mark all work after `step` as lost; an interval that contains `step` is split."""
        shortened: list[_Interval] = []
        if self._counted_intervals:
            self.lost_steps += max(0, self._counted_intervals[-1].last_step - step)
        while self._counted_intervals and (interval := self._counted_intervals[-1]).last_step > step:
            self._counted_intervals.pop()
            if interval.from_step < step:
                share = (interval.end_us - interval.start_us) * (step - interval.from_step)
                cut_us = interval.start_us + share // (interval.last_step - interval.from_step)
                self.intervals.append(
                    _Interval(
                        cut_us, interval.end_us, TimeCategory.LOST, interval.attempt, step, interval.last_step
                    )
                )
                interval.end_us, interval.last_step = cut_us, step
                shortened.append(interval)
            else:
                interval.category = TimeCategory.LOST
        self._counted_intervals += reversed(shortened)


@dataclass(frozen=True)
class TimeBreakdown:
    spans: tuple[TimeSpan, ...] = ()
    """Spans without gaps, from the first record of the run to the last."""
    lost_steps: int | None = 0
    """Number of lost steps, counted each time; None if no steps are reported."""
    measured: frozenset[TimeCategory] = frozenset(TimeCategory) - frozenset(CATEGORY_OF_FIELD.values())
    """Categories that the run reported separately; the time of other categories is part of training."""
    notes: tuple[str, ...] = ()
    """Remarks on the accuracy of the figures."""

    @classmethod
    def from_records(
        cls,
        events: Iterable[Event],
        metrics: Iterable[StepRecord] = (),
        *,
        until: float | None = None,
        waits: bool = False,
        reports_steps: bool | None = None,
    ) -> TimeBreakdown:
        """Compute the breakdown until now for an active run, or else until the last record."""
        timeline, saves = read_timeline_events(events, metrics)
        if not timeline:
            return cls()
        end_us = timeline[-1].time_us if until is None else microseconds(until)
        if not reports_steps:
            reports_steps = any(event.kind in ("step", "resumed") for event in timeline)
        book = _TimeAccountant(timeline[0], end_us, saves, logs_steps=reports_steps)
        # Events are freed one by one: a long run has millions, and intervals use as much memory.
        timeline.reverse()
        while timeline:
            book.add_event(timeline.pop())
        book.close(waits=waits)
        spans = tuple(_joined(book.intervals))
        if not reports_steps:
            return cls(spans, None, _WITHOUT_STEPS, (NO_STEPS_NOTE,))
        return cls(spans, book.lost_steps, cls.measured | book.measured)

    @property
    def knows_lost_work(self) -> bool:
        """True if the run reports its steps. Without steps, lost work is unknown."""
        return TimeCategory.LOST in self.measured

    @property
    def wall_us(self) -> int:
        return self.spans[-1].end_us - self.spans[0].start_us if self.spans else 0

    @cached_property
    def totals_us(self) -> dict[TimeCategory, int]:
        """Microseconds per category; the sum is `wall_us`."""
        totals = dict.fromkeys(TimeCategory, 0)
        for span in self.spans:
            totals[span.category] += span.end_us - span.start_us
        return totals


def _joined(intervals: Iterable[_Interval]) -> Iterator[TimeSpan]:
    span: TimeSpan | None = None
    for interval in sorted(intervals, key=lambda interval: interval.start_us):
        if interval.start_us == interval.end_us:
            continue
        if span is not None and (span.category, span.attempt) == (interval.category, interval.attempt):
            span = TimeSpan(span.start_us, interval.end_us, span.category, span.attempt)
            continue
        if span is not None:
            yield span
        span = TimeSpan(interval.start_us, interval.end_us, interval.category, interval.attempt)
    if span is not None:
        yield span


@dataclass(frozen=True)
class Goodput:
    """Ratios between 0 and 1; None if unknown, such as for a run that reports no steps."""

    ettr: float | None
    """Effective training time ratio: productive time divided by the time in which the run should progress.

    The definition is that of A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning
    Research Clusters", HPCA 2025, arXiv 2410.21680, section II. Steps that count and validation are
    productive; saving, loading, starting and lost work are not. Queue time is part of the denominator; idle
    time after the last step or between submissions is not.
    """
    training: float | None
    """Fraction of the total time spent on steps that count."""
    mfu: float | None = None
    """Model FLOPs utilisation: FLOPs of the steps that count, divided by the peak FLOPs of the GPUs.

    The definition is that of A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", JMLR 24,
    2023, arXiv 2204.02311, appendix B. Known only if the run logs `model_flops` and `peak_flops`.
    """


def compute_goodput(
    breakdown: TimeBreakdown, metrics: Iterable[StepRecord] = (), first_step: int = 0
) -> Goodput:
    """Return the goodput ratios of a run, from the records of the steps that count, after `first_step`."""
    if not breakdown.knows_lost_work:
        return Goodput(ettr=None, training=None)
    totals = breakdown.totals_us
    active_us = breakdown.wall_us - totals[TimeCategory.IDLE]
    steps_us = sum(totals[category] for category in STEP_CATEGORIES)
    productive_us = steps_us + totals[TimeCategory.VALIDATING]
    return Goodput(
        ettr=productive_us / active_us if active_us else None,
        training=steps_us / breakdown.wall_us if breakdown.wall_us else None,
        mfu=_mfu(steps_us / 1e6, metrics, first_step),
    )


def _mfu(seconds: float, metrics: Iterable[StepRecord], first_step: int) -> float | None:
    total_flops, peak, num_steps, last_step = 0.0, 0.0, 0, 0
    for record in metrics:
        flops, step_peak = record.metrics.get("model_flops"), record.metrics.get("peak_flops")
        if is_finite(flops) and is_finite(step_peak):
            total_flops, peak = total_flops + flops, max(peak, step_peak)
            num_steps, last_step = num_steps + 1, max(last_step, record.step)
    if not num_steps or not seconds or not math.isfinite(total_flops) or not 0 < peak < math.inf:
        return None
    # If only some steps are logged, their mean is used for all steps.
    return total_flops / num_steps * max(0, last_step - first_step) / (peak * seconds)
