"""Stop losing trials early, by comparing a metric at the same step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hpctrain.errors import UserError
from hpctrain.record_types import StepRecord, TrialLine
from hpctrain.text import format_number, is_count, pluralize

RuleName = Literal["median", "asha"]

#: Number of other trials that the median rule requires.
_MIN_OTHERS = 3


@dataclass(frozen=True)
class TrialReport:
    """Best and mean value of a trial up to a step. Lower is better; infinite if no value is finite."""

    step: int
    best: float
    mean: float

    def record(self) -> dict[str, Any]:
        values = {"best": self.best, "mean": self.mean}
        return {"step": self.step} | {name: v if math.isfinite(v) else None for name, v in values.items()}

    @classmethod
    def from_line(cls, line: TrialLine) -> TrialReport:
        best, mean = (math.inf if value is None else value for value in (line.best, line.mean))
        return cls(line.step, best, mean)


@dataclass(frozen=True)
class StoppingRule:
    """A rule that decides if a trial is stopped.

    `median`: the best value of the trial is worse than the median of the other trials' running means
    (Golovin et al., Google Vizier, 2017). `asha`: the trial is not among the best 1/`factor` of the trials
    that have reached the step (Li et al., A System for Massively Parallel Hyperparameter Tuning, 2020).
    """

    name: RuleName
    metric: str
    mode: Literal["min", "max"]
    min_steps: int
    """No trial is stopped before this step."""
    factor: int = 3
    """For `asha`: ratio between successive decision steps, and between the trials before and after each."""

    @classmethod
    def parse(cls, text: str, metric: str, mode: Literal["min", "max"], min_steps: int) -> StoppingRule:
        """Parse `median`, `asha` or `asha:FACTOR`."""
        name, colon, factor = text.partition(":")
        if name == "median" and not colon:
            return cls("median", metric, mode, min_steps)
        if name == "asha" and (not colon or (is_count(factor) and int(factor) >= 2)):
            return cls("asha", metric, mode, min_steps, int(factor or cls.factor))
        raise UserError(
            f"--stop-early is {text!r}, but must be median, asha or asha:FACTOR, with a FACTOR of at least 2."
        )

    def __post_init__(self) -> None:
        if self.min_steps < 1 or self.factor < 2:
            raise ValueError(
                f"min_steps is {self.min_steps} and factor is {self.factor}, but min_steps must be at least "
                "1 and factor at least 2"
            )

    def last_decision(self, step: int) -> int | None:
        """Return the last decision step up to `step`; None if there is none.

        `median` decides at multiples of `min_steps`, and `asha` at `min_steps` times the powers of `factor`.
        """
        if step < self.min_steps:
            return None
        if self.name == "median":
            return step - step % self.min_steps
        decision = self.min_steps
        while decision * self.factor <= step:
            decision *= self.factor
        return decision

    def reason_to_stop(self, report: TrialReport, others: Sequence[TrialReport]) -> str | None:
        if self.name == "median":
            if len(others) < _MIN_OTHERS:
                return None
            limit = statistics.median(other.mean for other in others)
            if report.best <= limit:
                return None
            return (
                f"stopped early at step {report.step} by the median rule: the best {self.metric} so far is "
                f"{self._text(report.best)}, worse than {self._text(limit)}, the median of {len(others)} "
                "other trials"
            )
        num_kept = max(1, (len(others) + 1) // self.factor)
        better = sum(other.best < report.best for other in others)
        if len(others) + 1 < self.factor or better < num_kept:
            return None
        return (
            f"stopped early at step {report.step} by ASHA: {pluralize(better, 'trial')} of {len(others) + 1} "
            f"had a better {self.metric} than {self._text(report.best)}, and the best {num_kept} continue"
        )

    def _text(self, value: float) -> str:
        return format_number(-value if self.mode == "max" else value)


class TrialCurve:
    """Running best and mean of a trial's metric, with a report at each decision step."""

    def __init__(self, rule: StoppingRule) -> None:
        self._rule, self._reported = rule, 0
        self._best, self._sum, self._count = math.inf, 0.0, 0

    def add(self, record: StepRecord) -> TrialReport | None:
        """Add a step. Return a report if the trial reached another decision step."""
        value = record.metrics.get(self._rule.metric)
        if not isinstance(value, int | float):
            return None
        if math.isfinite(value):
            signed = -value if self._rule.mode == "max" else float(value)
            self._best = min(self._best, signed)
            self._sum, self._count = self._sum + signed, self._count + 1
        decision = self._rule.last_decision(record.step)
        if decision is None or decision <= self._reported:
            return None
        self._reported = decision
        return TrialReport(decision, self._best, self._sum / self._count if self._count else math.inf)
