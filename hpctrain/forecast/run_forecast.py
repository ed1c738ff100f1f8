"""Prediction of a run from earlier runs of its kind: start, end, ETTR and cost, as ranges.

The predicted values are the middle 90% of simulated runs. For each of them, the pace, the time to start and
the wait are drawn from the distribution of the earlier runs, and the interruptions from their rates. The
simulation of the restarts is that of `hpctrain simulate`.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from hpctrain.checkpoint.interval import NODE_MTBF_S
from hpctrain.forecast.restart_simulation import DAY_S, Simulation, SimulationConfig
from hpctrain.spec.job_spec import JobSpec
from hpctrain.spec.restart_policy import REQUEUE_HOLD_S
from hpctrain.telemetry.hparams import HparamValue, merge_hparams
from hpctrain.telemetry.run_outcome import RunOutcome
from hpctrain.text import format_clock, format_number, format_share, is_finite, pluralize

#: Quantiles that a forecast contains. The range is between the first and the last.
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
#: Number of simulated runs, and of the newest earlier runs that are used.
_NUM_RUNS, _NUM_OUTCOMES = 100, 20
#: Prior of the relative spread of a time between two runs, and its weight in runs.
_SPREAD, _SPREAD_WEIGHT = 0.05, 1.0
#: Prior of the rate of interruptions: half an interruption (Jeffreys), in a time that yields the usual rate.
_PRIOR_COUNT, _STOPS_PER_DAY = 0.5, 0.5
#: A simulated run that takes longer than this multiple of its training time counts as failed.
_LONGEST = 50
#: More nodes are represented by this number of nodes, which fail more often.
_MAX_NODES = 8
#: Names of arguments with the length of a training.
_LENGTH_WORDS = ("step", "epoch", "iter")
#: Minimum number of runs that differ only in their length.
_MIN_SAME = 3
#: Relative difference between two runs of equal length.
_SAME_LENGTH = 0.01

#: The lower and the upper end of a range.
Range = tuple[float, float]


@dataclass(frozen=True)
class RunForecast:
    """Predicted quantiles (`LEVELS`) of a run. Times are seconds since the epoch."""

    runs: int
    """Number of earlier runs."""
    start: list[float]
    end: list[float]
    ettr: list[float]
    gpu_hours: list[float] | None = None
    """None for a run on CPUs."""
    kwh: list[float] | None = None
    """None if the earlier runs did not measure their energy."""
    cost: list[float] | None = None
    """None without a price per GPU-hour."""
    currency: str = ""

    @classmethod
    def from_record(cls, record: object) -> Self | None:
        """Return the forecast in an event; None if there is none, or if it is damaged."""
        if not isinstance(record, Mapping) or not isinstance(record.get("runs"), int):
            return None
        values = {name: record.get(name) for name in ("start", "end", "ettr", "gpu_hours", "kwh", "cost")}
        for name, value in values.items():
            is_valid = isinstance(value, list) and len(value) == len(LEVELS) and all(map(is_finite, value))
            if not is_valid and (name in ("start", "end", "ettr") or value is not None):
                return None
        return cls(record["runs"], **values, currency=str(record.get("currency") or ""))  # type: ignore[arg-type]

    def record(self) -> dict[str, Any]:
        """Return the forecast for an event."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}

    def __str__(self) -> str:
        parts = [
            f"start {format_range(self.start, format_clock)}",
            f"end {format_range(self.end, format_clock)}",
            f"ETTR {format_range(self.ettr, format_share)}",
        ]
        if self.gpu_hours is not None:
            parts.append(f"{format_range(self.gpu_hours)} GPU-hours")
        if self.cost is not None:
            parts.append(f"{format_range(self.cost)} {self.currency}".rstrip())
        if self.kwh is not None:
            parts.append(f"{format_range(self.kwh)} kWh")
        return f"Forecast from {pluralize(self.runs, 'earlier run')}: {', '.join(parts)}."


def format_range(quantiles: Sequence[float], form: Any = None) -> str:
    """Return a range of values as text."""
    low, high = ((form or three_digits)(value) for value in (quantiles[0], quantiles[-1]))
    return str(low) if low == high else f"{low}–{high}"


def three_digits(value: float) -> str:
    """Return a number with three significant digits."""
    return format_number(float(f"{value:.3g}"))


class RunForecaster:
    """Prediction of a run: the simulated runs, without the wait in the queue."""

    def __init__(self, spec: JobSpec, outcomes: Sequence[RunOutcome]) -> None:
        """Simulate the run.

        Args:
            spec: the job.
            outcomes: earlier runs of its kind, oldest first.
        """
        self._spec = spec
        self._random = random.Random(1)
        hparams = merge_hparams({"args": spec.args}, {})
        complete = [one for one in outcomes if one.state == "COMPLETED" and one.train_s > 0]
        self._outcomes = comparable_outcomes(hparams, complete)[-_NUM_OUTCOMES:]
        #: All ended runs show the rates of interruptions and the waits.
        self._all = list(outcomes)[-2 * _NUM_OUTCOMES :]
        steps = expected_steps(hparams, self._outcomes)
        self._runs = list(self._simulate(steps)) if steps else []

    def forecast(
        self,
        now: float,
        *,
        start_s: float | None = None,
        waits_s: Sequence[float] = (),
        price: float | None = None,
        currency: str = "",
    ) -> RunForecast | None:
        """Return the forecast; None if the earlier runs do not show the length of the run.

        Args:
            now: time of the submission, in seconds since the epoch.
            start_s: seconds until the start according to Slurm.
            waits_s: further waits in the queue, in seconds.
            price: price of a GPU-hour.
            currency: unit of the price.
        """
        if not self._runs:
            return None
        waits = [
            one.wait_s for one in self._all if one.partition == self._spec.directives.get("partition", "")
        ]
        waits += waits_s
        wait = TimeDistribution(waits) if waits else None
        starts, ends, ratios, hours = [], [], [], []
        for train_s, allocated_s in self._runs:
            # Slurm expects running jobs to use their whole limits, but no new jobs of a higher priority.
            wait_s = max(0.0, start_s or 0.0)
            if wait is not None and (start_s is None or self._random.random() < 0.5):
                wait_s = wait.time_s(wait.draw_deviation(self._random))
            starts.append(now + wait_s)
            ends.append(now + wait_s + allocated_s)
            ratios.append(min(1.0, train_s / (wait_s + allocated_s)))
            hours.append(allocated_s / 3600 * self._spec.nodes * self._spec.gpus_per_node)
        measured = [one for one in self._outcomes if one.kwh is not None and one.allocated_s]
        kwh = None
        if measured:
            per_s = statistics.fmean((one.kwh or 0.0) / one.allocated_s for one in measured)
            kwh = _quantiles([per_s * allocated_s for _, allocated_s in self._runs])
        return RunForecast(
            runs=len(self._outcomes),
            start=_quantiles(starts),
            end=_quantiles(ends),
            ettr=_quantiles(ratios),
            gpu_hours=_quantiles(hours) if any(hours) else None,
            kwh=kwh,
            cost=None if price is None or not any(hours) else _quantiles([price * each for each in hours]),
            currency=currency,
        )

    def _simulate(self, steps: float) -> Iterator[tuple[float, float]]:
        """Yield the training time and the time in allocations of simulated runs that complete."""
        known = self._outcomes
        pace, start, close = map(
            TimeDistribution,
            (
                [one.train_s / (one.steps or 1) for one in known],
                [one.start_s for one in known],
                [one.close_s for one in known],
            ),
        )
        conditions = RestartConditions.from_outcomes(vars(self._spec), self._all)
        for seed in range(_NUM_RUNS):
            # A busy machine or file system slows all parts of a run.
            deviation = pace.draw_deviation(self._random)
            train_s, start_s = steps * pace.time_s(deviation), start.time_s(deviation)
            took_s = conditions.simulate(train_s, start_s, seed)
            if took_s is not None:
                yield train_s, took_s + close.time_s(deviation)


class TimeDistribution:
    """Distribution of a time in the next run, given those of earlier runs.

    Times are log-normal with an unknown mean and spread, so the predictive distribution is Student's t
    (A. Gelman et al., "Bayesian Data Analysis", section 3.3, with a weak prior of the spread).
    """

    def __init__(self, values: Sequence[float]) -> None:
        logs = [math.log(max(value, 1e-3)) for value in values]
        self._mean, self._freedom = statistics.fmean(logs), _SPREAD_WEIGHT + len(logs) - 1
        total = _SPREAD_WEIGHT * _SPREAD**2 + sum((each - self._mean) ** 2 for each in logs)
        self._scale = math.sqrt(total / self._freedom * (1 + 1 / len(logs)))

    def draw_deviation(self, source: random.Random) -> float:
        """Draw a deviation from the mean, in units of the scale."""
        return source.gauss(0.0, 1.0) / math.sqrt(source.gammavariate(self._freedom / 2, 2.0) / self._freedom)

    def time_s(self, deviation: float) -> float:
        """Return the time with that deviation, which is limited to a factor of 20."""
        return math.exp(self._mean + max(-3.0, min(3.0, self._scale * deviation)))


@dataclass(frozen=True)
class RestartConditions:
    """Rates of interruptions, and the times that they cost. Times are in seconds."""

    spec: Mapping[str, Any]
    failures: int
    stops: int
    train_s: float
    """Training time in which the interruptions occurred; the simulation interrupts only training."""
    restart_s: float | None
    requeue_s: float | None
    """From an interruption to the next step, in another allocation."""
    save_every_s: float | None

    @classmethod
    def from_outcomes(cls, spec: Mapping[str, Any], outcomes: Sequence[RunOutcome]) -> Self:
        """Return the conditions of earlier runs of one kind."""

        def mean(name: str) -> float | None:
            values = [value for one in outcomes if (value := getattr(one, name)) is not None]
            return statistics.fmean(values) if values else None

        return cls(
            spec,
            failures=sum(one.failures for one in outcomes),
            stops=sum(one.stops for one in outcomes),
            train_s=sum(one.train_s for one in outcomes),
            restart_s=mean("restart_s"),
            requeue_s=mean("requeue_s"),
            save_every_s=mean("save_every_s"),
        )

    def simulate(self, train_s: float, start_s: float, seed: int, *, more_spares: int = 0) -> float | None:
        """Return the time in allocations of a simulated run; None if it fails.

        Args:
            train_s: training time on all nodes.
            start_s: time of the first start.
            seed: seed of the rates and of the interruptions.
            more_spares: number of spare nodes in addition to those of the job.
        """
        draw, all_nodes = random.Random(seed), self.spec["nodes"]
        nodes = min(all_nodes, _MAX_NODES)
        # The time in which half an interruption is expected, unless the history contains one.
        failures_s = 0.0 if self.failures else _PRIOR_COUNT * NODE_MTBF_S / all_nodes
        stops_s = 0.0 if self.stops else _PRIOR_COUNT * DAY_S / _STOPS_PER_DAY
        failure_rate, stop_rate = (
            draw.gammavariate(_PRIOR_COUNT + count, 1.0) / max(1.0, self.train_s + prior_s)
            for count, prior_s in ((self.failures, failures_s), (self.stops, stops_s))
        )
        restart_s = start_s if self.restart_s is None else self.restart_s
        hold_s = 0.0 if self.spec["backend"] == "local" else REQUEUE_HOLD_S
        requeue_s = restart_s + hold_s if self.requeue_s is None else self.requeue_s
        config = SimulationConfig(
            gpus=3 * nodes + 2,
            gpus_per_node=1,
            days=_LONGEST * (train_s + requeue_s) / DAY_S,
            node_mtbf_days=nodes / max(failure_rate, 1e-12) / DAY_S,
            bad_nodes=0.0,
            preemptions_per_day=stop_rate * DAY_S,
            time_limit_days=(self.spec.get("time_limit_s") or math.inf) / DAY_S,
            save_every_s=self.save_every_s or DAY_S * 365,
            run_gpus=nodes,
            run_needs_s=train_s,
            spare_nodes=min(nodes, self.spec.get("spare_nodes") or 0) + more_spares,
            max_failures=self.spec.get("max_failures") or JobSpec.max_failures,
            restart_s=restart_s,
            requeue_hold_s=max(0.0, requeue_s - restart_s),
            seed=seed,
        )
        run = Simulation(config).run().runs[0]
        if run.state != "complete" or run.ended is None:
            return None
        return run.ended - restart_s + start_s


def comparable_outcomes(
    hparams: Mapping[str, HparamValue], outcomes: Sequence[RunOutcome]
) -> list[RunOutcome]:
    """Return the runs whose time per step is that of a run with these arguments.

    These are the runs that differ only in their length. If there are fewer than three, all runs are used.
    """
    same = [one for one in outcomes if _without_lengths(one.hparams) == _without_lengths(hparams)]
    return same if len(same) >= min(_MIN_SAME, len(outcomes)) else list(outcomes)


def _without_lengths(hparams: Mapping[str, HparamValue]) -> dict[str, HparamValue]:
    return {name: value for name, value in hparams.items() if not _is_length(name)}


def _is_length(name: str) -> bool:
    return any(word in name.lower() for word in _LENGTH_WORDS)


def expected_steps(hparams: Mapping[str, HparamValue], outcomes: Sequence[RunOutcome]) -> float | None:
    """Return the number of steps of a run with these arguments; None if unknown.

    The number is that of the newest run with the same arguments. Otherwise, it is proportional to an argument
    such as `max_steps` or `epochs`, if it was so in all runs. A run that does not report steps counts as one.
    """
    for one in reversed(outcomes):
        if one.hparams == hparams:
            return one.steps or 1
    known = [one for one in outcomes if one.steps]
    for name, value in hparams.items():
        given = [one.hparams.get(name) for one in known]
        if (
            known
            and _is_length(name)
            and is_finite(value)
            and all(is_finite(each) and each for each in given)
        ):
            ratios = [(one.steps or 0) / float(each) for one, each in zip(known, given, strict=True)]  # type: ignore[arg-type]
            if max(ratios) - min(ratios) <= _SAME_LENGTH * max(ratios):
                return float(value) * ratios[-1]
    lengths = {one.steps for one in known}
    same = known and all(
        {key: its for key, its in one.hparams.items() if _is_length(key)}
        == {key: its for key, its in hparams.items() if _is_length(key)}
        for one in known
    )
    return float(lengths.pop() or 0) or None if same and len(lengths) == 1 else None


def _quantiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [round(ordered[round(level * (len(ordered) - 1))], 3) for level in LEVELS]
