"""Break down the time of a run by category: every microsecond counts once. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpctrain.telemetry.accounting.time_accountant import CATEGORY_OF_FIELD, Interval, TimeAccountant
from hpctrain.telemetry.accounting.timeline_events import (
    TimeCategory,
    TimeSpan,
    microseconds,
    read_timeline_events,
)

NO_STEPS_NOTE = (
    "No steps are reported, so all time between the start and the end of the ranks counts as training, and "
    "lost work is unknown."
)
#: Categories that are known without reported steps.
_WITHOUT_STEPS = frozenset(
    {TimeCategory.TRAINING, TimeCategory.RESTARTING, TimeCategory.QUEUED, TimeCategory.IDLE}
)


@dataclass(frozen=True)
class TimeBreakdown:
    """Time of a run by category."""

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
        events: Iterable[Mapping[str, Any]],
        metrics: Iterable[Mapping[str, Any]] = (),
        *,
        until: float | None = None,
        waits: bool = False,
        reports_steps: bool | None = None,
    ) -> TimeBreakdown:
        """Compute the breakdown from the records of a run.

        Args:
            events: lines of `events.jsonl`, in file order.
            metrics: lines of `metrics.jsonl`, in file order.
            until: the current time of an active run, in seconds since the epoch; None ends at the last
                record.
            waits: true if the run is in the queue, according to the scheduler.
            reports_steps: true if the run reports its steps; None infers this from the records.
        """
        timeline, saves = read_timeline_events(events, metrics)
        if not timeline:
            return cls()
        now_us = microseconds(until)
        end_us = timeline[-1].time_us if now_us is None else now_us
        if not reports_steps:
            reports_steps = any(event.kind in ("step", "resumed") for event in timeline)
        book = TimeAccountant(timeline[0], end_us, saves, logs_steps=reports_steps)
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
        """Total time of the run, in microseconds."""
        return self.spans[-1].end_us - self.spans[0].start_us if self.spans else 0

    @cached_property
    def totals_us(self) -> dict[TimeCategory, int]:
        """Microseconds per category; the sum is `wall_us`."""
        totals = dict.fromkeys(TimeCategory, 0)
        for span in self.spans:
            totals[span.category] += span.end_us - span.start_us
        return totals


def _joined(intervals: Iterable[Interval]) -> Iterator[TimeSpan]:
    """Merge adjacent intervals of the same category and attempt."""
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
