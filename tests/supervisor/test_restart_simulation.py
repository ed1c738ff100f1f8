"""Simulated clusters: no run is lost or restarts forever, and every end has a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.spec.restart_policy import DEFAULT_RULES, EndKind
from hpctrain.supervisor.policy.decide import CRASHES_PER_FAILURE
from hpctrain.supervisor.restart_simulation import DAY_S, Simulation, SimulationConfig

#: All budgets together: the table allows no more starts without a checkpoint.
_MOST_STARTS = 3 + sum(row.retries or 0 for row in DEFAULT_RULES.values()) + 1


def check(conditions: SimulationConfig):
    report = Simulation(conditions).run()
    end = conditions.days * DAY_S
    assert report.runs
    busy: list[str] = []
    for run in report.runs:
        # Each run trains, waits, or has ended, with the reason if it failed.
        assert run.state in ("trains", "waits", "complete", "failed")
        assert (run.state == "failed") == bool(run.reason)
        if run.state == "complete":
            assert run.trained_s == pytest.approx(run.needs_s)
            assert run.fails_after_s is None or run.fails_after_s >= run.needs_s
        busy += [*run.hosts, *run.spare]
        assert all("cause" in event for event in run.events if event["kind"] == "failure")
    # No node trains two runs.
    assert len(busy) == len(set(busy))
    assert report.most_starts_without_progress <= _MOST_STARTS
    # Endless restarts would give far more ends.
    assert sum(report.ends.values()) < len(report.runs) * (50 + 20 * conditions.days * CRASHES_PER_FAILURE)
    assert all(run.ended is None or run.ended <= end for run in report.runs)
    return report


@pytest.mark.long
def test_month_on_10000_gpus():
    report = check(SimulationConfig())
    assert report.conditions.num_nodes * report.conditions.gpus_per_node == 10_000
    states = report.states()
    assert states["complete"] > 0.7 * len(report.runs)
    # Only a script's own repeated error fails a run here.
    assert all("an error in the script" in run.reason for run in report.runs if run.state == "failed")
    doomed = [run for run in report.runs if run.fails_after_s is not None and run.ended is not None]
    assert all(run.state == "failed" or run.fails_after_s > run.needs_s for run in doomed)
    assert {EndKind.PREEMPTED, EndKind.GPU, EndKind.NODE_LOST, EndKind.TIME_LIMIT} <= report.ends.keys()
    assert report.lost_s < 0.05 * report.trained_s


def test_emergency_checkpoints_reduce_lost_time():
    conditions = SimulationConfig(gpus=2000, days=5)
    without, with_them = check(conditions), check(replace(conditions, emergency_checkpoints=True))
    assert with_them.lost_s < 0.85 * without.lost_s


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    gpus=st.integers(8, 200),
    mtbf=st.floats(0.2, 100),
    bad=st.floats(0, 1),
    preemptions=st.floats(0.01, 20),
    limit=st.floats(0.01, 3),
    doomed=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
def test_random_conditions(gpus, mtbf, bad, preemptions, limit, doomed, seed):
    check(
        SimulationConfig(
            gpus=gpus,
            days=1,
            node_mtbf_days=mtbf,
            bad_nodes=bad,
            preemptions_per_day=preemptions,
            time_limit_days=limit,
            doomed=doomed,
            seed=seed,
        )
    )
