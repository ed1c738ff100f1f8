"""Comparison of a run with its forecast and with earlier runs, and calibration of all forecasts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from hpctrain.forecast.run_forecast import LEVELS, RunForecast, format_range, three_digits
from hpctrain.telemetry.report.run_data import ForecastCheck, PredictedValue, RunData
from hpctrain.telemetry.run_outcome import RunOutcome, kind_of
from hpctrain.telemetry.summarize_run import summarize_run
from hpctrain.text import format_clock, format_share, pluralize

#: Percentiles of fewer runs are not shown.
_MIN_RUNS = 5


def check_forecast(run_data: RunData, outcomes: Sequence[RunOutcome]) -> ForecastCheck:
    """Compare a run with its forecast, and with the runs in its folder.

    Args:
        run_data: the run.
        outcomes: outcomes of the runs in the folder, oldest first.
    """
    calibration, in_range = calibrate(outcomes)
    own = summarize_run(run_data)
    earlier = [
        one
        for one in outcomes
        if own is not None and one.kind == kind_of(run_data.spec) and one.ended < own.submitted
    ]
    return ForecastCheck(
        values=list(_values(run_data, own)),
        num_checked=len(in_range),
        in_range=statistics.fmean(in_range) if in_range else None,
        calibration=calibration,
        percentiles=list(_percentiles(own, earlier)) if own is not None else [],
    )


def calibrate(outcomes: Sequence[RunOutcome]) -> tuple[list[tuple[float, float]], list[bool]]:
    """Fraction of completed runs that ended before each quantile, and whether each was in its range."""
    found = [
        (one.ended, forecast.end)
        for one in outcomes
        if one.state == "COMPLETED" and (forecast := RunForecast.from_record(one.forecast)) is not None
    ]
    if not found:
        return [], []
    fractions = [
        (level, statistics.fmean(ended <= quantiles[place] for ended, quantiles in found))
        for place, level in enumerate(LEVELS)
    ]
    return fractions, [quantiles[0] <= ended <= quantiles[-1] for ended, quantiles in found]


def _values(run_data: RunData, own: RunOutcome | None) -> Iterator[PredictedValue]:
    """Yield the predicted values; those of the end remain open unless the run completed."""
    events = [
        event for event in run_data.events if event.get("kind") == "submitted" and not event.get("after")
    ]
    forecast = RunForecast.from_record(events[0].get("forecast")) if len(events) == 1 else None
    if forecast is None:
        return
    done = own if own is not None and own.state == "COMPLETED" else None
    started = run_data.attempts[0].started if run_data.attempts else None
    ended = ettr = hours = kwh = cost = None
    if done is not None:
        ended, ettr, hours, kwh = done.ended, done.ettr, done.allocated_s / 3600 * done.gpus, done.kwh
        if forecast.cost and forecast.gpu_hours and forecast.gpu_hours[-1]:
            cost = hours * forecast.cost[-1] / forecast.gpu_hours[-1]
    rows: list[tuple[str, list[float] | None, float | None, Any]] = [
        ("start", forecast.start, started, format_clock),
        ("end", forecast.end, ended, format_clock),
        ("ETTR", forecast.ettr, ettr, format_share),
        ("GPU-hours", forecast.gpu_hours, hours, three_digits),
        (f"cost {forecast.currency}".rstrip(), forecast.cost, cost, three_digits),
        ("kWh", forecast.kwh, kwh, three_digits),
    ]
    for name, quantiles, actual, form in rows:
        if quantiles is not None:
            # Times are shown in seconds, so a fraction of a second is not a deviation.
            low, high = quantiles[0], quantiles[-1]
            if form is format_clock:
                low, high = math.floor(low), math.ceil(high)
            is_in_range = None if actual is None else low <= actual <= high
            text = "–" if actual is None else form(actual)
            yield PredictedValue(name, format_range(quantiles, form), text, is_in_range)


def _percentiles(own: RunOutcome, earlier: Sequence[RunOutcome]) -> Iterator[str]:
    def values(one: RunOutcome) -> dict[str, float | None]:
        return {
            "steps per second": one.steps / one.train_s if one.steps and one.train_s else None,
            "productive time (ETTR)": one.ettr,
            "time in the queue": one.wait_s,
            "energy per step": one.kwh / one.steps if one.kwh is not None and one.steps else None,
        }

    for name, mine in values(own).items():
        others = [value for one in earlier if (value := values(one)[name]) is not None]
        if mine is not None and len(others) >= _MIN_RUNS:
            lower = statistics.fmean(value < mine for value in others)
            runs = pluralize(len(others), "earlier run")
            yield f"{name}: higher than in {format_share(lower)} of {runs} of this kind"
