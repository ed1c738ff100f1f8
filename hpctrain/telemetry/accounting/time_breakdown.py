"""Break down the time of a run by category, and compute its goodput. Every microsecond counts once."""

from __future__ import annotations

import math
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
from hpctrain.text import is_finite

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
        """Compute the breakdown from the lines of `events.jsonl` and `metrics.jsonl`, in file order.

        Args:
            events: the events.
            metrics: the metrics.
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
    breakdown: TimeBreakdown, metrics: Iterable[Mapping[str, Any]] = (), first_step: int = 0
) -> Goodput:
    """Return the goodput ratios of a run. `metrics` are the records of the steps that count.

    `first_step` is the number of steps before the run, if it began with an imported checkpoint.
    """
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


def _mfu(seconds: float, metrics: Iterable[Mapping[str, Any]], first_step: int) -> float | None:
    total_flops, peak, num_steps, last_step = 0.0, 0.0, 0, 0
    for record in metrics:
        flops, step_peak, step = (record.get(name) for name in ("model_flops", "peak_flops", "step"))
        if is_finite(flops) and is_finite(step_peak) and isinstance(step, int):
            total_flops, peak = total_flops + flops, max(peak, step_peak)
            num_steps, last_step = num_steps + 1, max(last_step, step)
    if not num_steps or not seconds or not math.isfinite(total_flops) or not 0 < peak < math.inf:
        return None
    # If only some steps are logged, their mean is used for all steps.
    return total_flops / num_steps * max(0, last_step - first_step) / (peak * seconds)
