"""Metrics of a run as curves, and curves with few points that still show every spike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.telemetry.marks import is_finite
from hpctrain.telemetry.metrics import NO_METRICS

#: Lines that a rate is the mean of, at the least, and how many rates a long run has.
_LEAST_STRETCH, _STRETCHES = 4, 2000

Point = tuple[float, float | None]


@dataclass
class Curves:
    """What a run measured, step by step."""

    counting: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Of each logged step the line that counts, in the order of the steps."""
    again: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Of steps that were trained again, the line before."""
    by_attempt: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The first and the last step that each attempt logged."""
    _points: dict[str, list[Point]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, metrics: Iterable[Mapping[str, Any]]) -> Curves:
        """Read the lines of `metrics.jsonl`; of a step that has several of one attempt, they are joined."""
        curves = cls()
        for record in metrics:
            step = record.get("step")
            if not isinstance(step, int) or isinstance(step, bool) or step < 0:
                continue
            attempt = attempt_of(record)
            first, _ = curves.by_attempt.get(attempt, (step, step))
            curves.by_attempt[attempt] = (first, step)
            if (before := curves.counting.get(step)) is None:
                curves.counting[step] = record
            elif attempt_of(before) == attempt:
                curves.counting[step] = {**before, **record}
            else:
                curves.again[step] = before
                curves.counting[step] = record
        curves.counting = dict(sorted(curves.counting.items()))
        curves.again = dict(sorted(curves.again.items()))
        return curves

    @property
    def names(self) -> list[str]:
        """Names of all metrics: loss first, then those of validation, then the others."""
        names = {name for record in self.counting.values() for name in record} - NO_METRICS
        names = {name for name in names if any(value is not None for _, value in self.points(name))}
        return sorted(names, key=lambda name: (name != "loss", not name.startswith("val"), name))

    def points(self, name: str, lines: Mapping[int, Mapping[str, Any]] | None = None) -> list[Point]:
        """A metric by step, where it is there; of `lines`, with a gap where steps are missing."""
        if lines is None:
            if name not in self._points:
                self._points[name] = [
                    (step, as_number(record[name]))
                    for step, record in self.counting.items()
                    if name in record
                ]
            return self._points[name]
        points: list[Point] = []
        for step, record in lines.items():
            if name in record:
                if points and step - points[-1][0] > 1:
                    points.append((points[-1][0] + 0.5, None))
                points.append((step, as_number(record[name])))
        return points

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        for record in reversed(self.counting.values()):
            if is_finite(value := record.get(name)):
                return float(value)
        return None

    def no_number_since(self, name: str) -> int | None:
        """The step from which on each value of a metric is infinite or not a number, if the last one is."""
        since = None
        for step, record in reversed(self.counting.items()):
            if name in record:
                if type(value := record[name]) is not float or math.isfinite(value):
                    break
                since = step
        return since

    def lowest(self, name: str) -> Point | None:
        """The lowest value of a metric, and its step."""
        known = [(value, step) for step, value in self.points(name) if value is not None]
        if not known:
            return None
        value, step = min(known)
        return step, value


def rates(metrics: Sequence[Mapping[str, Any]], start: float) -> list[Point]:
    """Steps a second over the seconds since `start`, of each attempt by itself, with a gap between two.

    Each is of a stretch of lines: a line is written when the next step's work is on its way, or at once where
    a save is due, so that the time between two lines alone says little.
    """
    stretch = max(_LEAST_STRETCH, len(metrics) // _STRETCHES)
    points: list[Point] = []
    before: tuple[int, int, float] | None = None
    number = 0
    for record in metrics:
        step, time, attempt = record.get("step"), record.get("time"), attempt_of(record)
        if not isinstance(step, int) or not is_finite(time) or time < start:
            continue
        number += 1
        if before is None or attempt != before[0]:
            if points:
                points.append((time - start, None))
            before, number = (attempt, step, time), 0
        elif number >= stretch and step > before[1] and time > before[2]:
            points.append((time - start, (step - before[1]) / (time - before[2])))
            before, number = (attempt, step, time), 0
    return sorted(points, key=lambda point: point[0])


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """At most about `most` points, which have the first and last, and the lowest and highest of each stretch.

    Gaps stay. Values that are no numbers, such as nan, are gaps.
    """
    if len(points) <= most:
        return list(points)
    buckets = max(1, most // 4)
    low, high = points[0][0], points[-1][0]
    width = (high - low) / buckets or 1.0
    thinned: list[Point] = []
    begin = 0
    while begin < len(points):
        edge = low + width * (math.floor((points[begin][0] - low) / width) + 1)
        end = begin + 1
        while end < len(points) and points[end][0] < edge:
            end += 1
        thinned += _extremes(points, begin, end)
        begin = end
    return thinned


def _extremes(points: Sequence[Point], begin: int, end: int) -> list[Point]:
    """First, lowest, highest and last of a stretch, and its first gap."""
    values = [(value, place) for place in range(begin, end) if (value := points[place][1]) is not None]
    places = {begin, end - 1}
    if values:
        places |= {min(values)[1], max(values)[1]}
    gap = next((place for place in range(begin, end) if points[place][1] is None), None)
    if gap is not None:
        places.add(gap)
    return [points[place] for place in sorted(places)]


def as_number(value: object) -> float | None:
    """A finite number; None for everything else."""
    return float(value) if is_finite(value) else None


def attempt_of(record: Mapping[str, Any]) -> int:
    """The start of the ranks that a line is of."""
    attempt = record.get("attempt")
    return attempt if isinstance(attempt, int) and not isinstance(attempt, bool) else 0
