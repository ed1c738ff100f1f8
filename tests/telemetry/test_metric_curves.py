import math

import pytest
from helpers.run_histories import started_run, step_record
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.telemetry.report.metric_curves import MetricCurves, downsample, step_rates

VALUES = st.one_of(st.none(), st.floats(-1e9, 1e9), st.floats(-1, 1))


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=400), st.integers(8, 100))
def test_downsampled_curve_keeps_ends_spikes_and_gaps(values, max_points):
    points = [(float(step), value) for step, value in enumerate(values)]
    kept = downsample(points, max_points)
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert set(kept) <= set(points)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert len(kept) <= max(max_points, 5 * (max_points // 4 + 1))
    finite = [value for value in values if value is not None]
    if finite:
        assert {min(finite), max(finite)} <= {value for _, value in kept}
    assert (None in values) == (None in [value for _, value in kept])


def test_downsampling_keeps_every_spike():
    spikes = set(range(777, 100_000, 9973))
    points = [(step, 100.0 if step in spikes else 1.0) for step in range(100_000)]
    kept = downsample(points, 4000)
    assert len(kept) <= 4000
    assert {x for x, value in kept if value == 100.0} == spikes


def test_later_record_of_a_repeated_step_counts():
    history = started_run(0).steps(1, 5, every=1).after(0, "failure", rank=0).after(0, "started")
    history.steps(4, 6, every=1, loss=9.0)
    curves = MetricCurves.from_records(history.metrics)
    assert curves.points("loss")[-3:] == [(4, 9.0), (5, 9.0), (6, 9.0)]
    assert curves.superseded_points("loss") == [(4, 1 / 4), (5, 1 / 5)]
    assert curves.by_attempt == {0: (1, 5), 1: (4, 6)}
    assert curves.lowest("loss") == (3, 1 / 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "high", None, True, [1], 10**400])
def test_non_finite_values_are_gaps(value):
    curves = MetricCurves.from_records([step_record(1, loss=1.0), step_record(2, loss=value)])
    assert curves.points("loss") == [(1, 1.0), (2, None)]


def test_step_rates_are_computed_per_attempt():
    history = started_run(0).steps(1, 9, every=0.5).after(0, "failure", rank=0).after(100, "started")
    history.steps(5, 13, every=0.25)
    assert step_rates(history.metrics) == [(5, 2.0), (9, 4.0), (13, 4.0)]
