"""Collect the metrics of a run as curves, and downsample curves without losing spikes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from hpctrain.record_types import StepRecord
from hpctrain.rundir import RunDir
from hpctrain.text import format_count, format_number, is_finite

#: Metrics that are not shown as curves. FLOPs are logged only for the model FLOPs utilization.
NOT_CURVES = frozenset({"model_flops", "peak_flops"})


def reports_steps(run: RunDir, *, has_steps: bool, completed: bool) -> bool | None:
    """Return true if the script of a run reports its steps; None if the first step may be pending."""
    # The `Trainer` writes its environment before the first step.
    if has_steps or run.environment.is_file():
        return True
    return False if completed else None


def why_unknown(reports: bool | None) -> str:
    return "the script reports no steps" if reports is False else "no steps have been reported"


def describe_step(step: int | None, reports: bool | None) -> str:
    if step is None:
        return "none so far" if reports else f"unknown: {why_unknown(reports)}"
    return format_count(step)


def metric_values(record: StepRecord) -> dict[str, float]:
    """Return the metrics of a line by name, including infinite and NaN values."""
    return {
        name: float(value)
        for name, value in record.metrics.items()
        if name not in NOT_CURVES and (type(value) is float or (type(value) is int and abs(value) < 1e300))
    }


#: Minimum number of lines over which a rate is averaged, and number of rates in a long run.
_MIN_LINES_PER_RATE, _NUM_RATES = 4, 2000

CurvePoint = tuple[float, float | None]


@dataclass
class MetricCurves:
    effective: dict[int, StepRecord] = field(default_factory=dict)
    """The valid line of each logged step, in order of steps."""
    superseded: dict[int, StepRecord] = field(default_factory=dict)
    """The previous line of each step that was repeated."""
    by_attempt: dict[int, tuple[int, int]] = field(default_factory=dict)
    """First step, as far as recorded, and last logged step of each attempt."""
    _points: dict[str, list[CurvePoint]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_records(cls, metrics: Iterable[StepRecord]) -> MetricCurves:
        """Read the lines of `metrics.jsonl`; lines of the same step and attempt are merged."""
        curves = cls()
        for record in metrics:
            step, attempt = record.step, record.attempt
            first_step, _ = curves.by_attempt.get(attempt, (record.first_step or step, step))
            curves.by_attempt[attempt] = (first_step, step)
            if (before := curves.effective.get(step)) is None:
                curves.effective[step] = record
            elif before.attempt == attempt:
                curves.effective[step] = replace(record, metrics=before.metrics | record.metrics)
            else:
                curves.superseded[step] = before
                curves.effective[step] = record
        curves.effective = dict(sorted(curves.effective.items()))
        curves.superseded = dict(sorted(curves.superseded.items()))
        return curves

    @property
    def names(self) -> list[str]:
        """Names of all metrics: loss, then validation metrics, then others."""
        logged = set().union(*(record.metrics for record in self.effective.values()))
        names = filter(self._has_numbers, logged - NOT_CURVES)
        return sorted(names, key=lambda name: (name != "loss", not name.startswith("val"), name))

    def _has_numbers(self, name: str) -> bool:
        values = (record.metrics.get(name) for record in self.effective.values())
        return any(type(value) is float or is_finite(value) for value in values)

    def points(self, name: str) -> list[CurvePoint]:
        if name not in self._points:
            self._points[name] = _points(self.effective, name)
        return self._points[name]

    def superseded_points(self, name: str) -> list[CurvePoint]:
        """Return the previous values of a metric at repeated steps, with gaps at the other steps."""
        points: list[CurvePoint] = []
        for step, value in _points(self.superseded, name):
            if points and step - points[-1][0] > 1:
                points.append((points[-1][0] + 0.5, None))
            points.append((step, value))
        return points

    def last(self, name: str) -> float | None:
        return next((value for _, value in reversed(self.points(name)) if value is not None), None)

    def no_number_since(self, name: str) -> int | None:
        """Return the first step of a metric's final NaN or infinite values; None if the last is finite."""
        since = None
        for step, record in reversed(self.effective.items()):
            value = record.metrics.get(name, math.nan)
            if type(value) is not float or math.isfinite(value):
                break
            since = step if name in record.metrics else since
        return since

    def not_finite(self, name: str) -> list[tuple[int, str]]:
        """Return the steps at which a metric is NaN or infinite, and the value as a string."""
        return [
            (step, format_number(value))
            for step, record in self.effective.items()
            if type(value := record.metrics.get(name)) is float and not math.isfinite(value)
        ]

    def last_text(self, name: str) -> str:
        """Return the newest value of a metric as a string; `NaN` if it is not a number."""
        if self.no_number_since(name) is None:
            return format_number(self.last(name))
        return self.not_finite(name)[-1][1]

    def lowest(self, name: str) -> CurvePoint | None:
        values = [(value, step) for step, value in self.points(name) if value is not None]
        if not values:
            return None
        value, step = min(values)
        return step, value


def _points(records: Mapping[int, StepRecord], name: str) -> list[CurvePoint]:
    metrics = ((step, record.metrics) for step, record in records.items())
    return [(step, as_number(values[name])) for step, values in metrics if name in values]


def step_rates(metrics: Sequence[StepRecord]) -> list[CurvePoint]:
    """Return steps per second by step; for a repeated step, those of the last attempt.

    Each rate covers several lines, because the time between two lines is noisy. A line is normally written
    after the launch of the next step, but immediately before a save.
    """
    lines_per_rate = max(_MIN_LINES_PER_RATE, len(metrics) // _NUM_RATES)
    rates: dict[int, float] = {}
    before: StepRecord | None = None
    num_lines = 0
    for record in metrics:
        num_lines += 1
        if before is None or record.attempt != before.attempt:
            before, num_lines = record, 0
        elif num_lines >= lines_per_rate and record.step > before.step and record.time > before.time:
            rates[record.step] = (record.step - before.step) / (record.time - before.time)
            before, num_lines = record, 0
    return [(step, rates[step]) for step in sorted(rates)]


def downsample(points: Sequence[CurvePoint], limit: int) -> list[CurvePoint]:
    """Return at most about `limit` points: the first, last, lowest, highest and first gap of each bucket."""
    if len(points) <= limit:
        return list(points)
    size = -(-4 * len(points) // limit)
    sampled: list[CurvePoint] = []
    for begin in range(0, len(points), size):
        bucket = range(begin, min(begin + size, len(points)))
        values = [(value, index) for index in bucket if (value := points[index][1]) is not None]
        indices = {bucket[0], bucket[-1]}
        if values:
            indices |= {min(values)[1], max(values)[1]}
        if len(values) < len(bucket):
            indices.add(next(index for index in bucket if points[index][1] is None))
        sampled += [points[index] for index in sorted(indices)]
    return sampled


def as_number(value: object) -> float | None:
    return float(value) if is_finite(value) else None
