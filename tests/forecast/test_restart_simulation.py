"""Simulated clusters: no run is lost or restarts forever, and every end has a reason."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cli.simulate import command
from hpctrain.forecast.restart_simulation import DAY_S, Simulation, SimulationConfig
from hpctrain.spec.restart_policy import DEFAULT_RULES, EndKind
from hpctrain.supervisor.policy.decide import CRASHES_PER_FAILURE

#: They start many processes or trainings, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow

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
    copies = check(replace(conditions, emergency_checkpoints=True, copy_every_s=600.0))
    assert with_them.lost_s < copies.lost_s < without.lost_s
    assert without.emergency_checkpoints == 0 < copies.emergency_checkpoints


def test_output_names_the_source_of_emergency_checkpoints():
    options = ["--gpus=500", "--days=3", "--emergency-checkpoints"]
    saved = CliRunner().invoke(command, options).output
    assert re.search(r"^memory   \d+ emergency checkpoints? from surviving ranks$", saved, re.MULTILINE)
    copied = CliRunner().invoke(command, [*options, "--copy-every=60"]).output
    assert re.search(r"^memory   \d+ emergency checkpoints? from copies every 60 s$", copied, re.MULTILINE)


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


DOCS = (Path(__file__).parents[2] / "docs/restart-policy.md").read_text()
#: Options that docs/restart-policy.md states for each number of GPUs.
SIZES = {
    1024: {"spare_nodes": 2, "node_mtbf_days": 42.1, "days": 90},
    16384: {"spare_nodes": 20, "node_mtbf_days": 153.6, "days": 15},
    131072: {"spare_nodes": 160, "node_mtbf_days": 159.3, "days": 2},
}
CHECKPOINTS = {
    "every 30 min": {"save_every_s": 1800},
    "every 5 min": {"save_every_s": 300},
    "every 5 min and emergency": {"save_every_s": 300, "emergency_checkpoints": True},
}


def simulate_run(run_gpus, **changes):
    cluster = {"gpus": 2 * run_gpus, "bad_nodes": 0, "preemptions_per_day": 0, "max_failures": 10}
    report = check(SimulationConfig(run_gpus=run_gpus, **{**cluster, **changes}))
    assert len(report.runs) == 1
    assert len(report.runs[0].hosts) in (0, run_gpus // 8)
    return report


@pytest.mark.long
@pytest.mark.parametrize("words", CHECKPOINTS)
@pytest.mark.parametrize("gpus", SIZES)
def test_table_of_effective_training_time(gpus, words):
    (cells,) = re.findall(rf"^\| {gpus:,} \| {words} \| (.+) \|$", DOCS, re.MULTILINE)
    for restart_s, cell in zip((3, 10, 60, 300), cells.split(" | "), strict=True):
        report = simulate_run(gpus, restart_s=restart_s, **SIZES[gpus], **CHECKPOINTS[words])
        failed = report.runs[0].state == "failed"
        assert cell == ("fails" if failed else f"{100 * report.effective:.1f}%"), restart_s


def test_documented_command():
    text = re.search(
        r"^hpctrain simulate (--run-gpus.*?)^```\n\n```text\n(.*?)\n```", DOCS, re.MULTILINE | re.DOTALL
    )
    result = CliRunner().invoke(command, text[1].replace("\\\n", " ").split())
    assert text[2] in result.output


def test_run_fails_if_checkpoints_are_too_rare():
    report = simulate_run(131072, restart_s=60, **SIZES[131072], save_every_s=300, max_failures=3)
    assert "3 consecutive failures without a new checkpoint" in report.runs[0].reason


def test_run_starts_after_most_other_nodes_were_excluded():
    changes = {**SIZES[1024], "gpus": 1280, "days": 60}
    report = simulate_run(1024, **changes)
    assert report.runs[0].state == "trains"
    assert report.effective > 0.9


#: GPUs, days, interval of the published failures, cost of each, checkpoint interval, preemptions per day,
#: published ratio. Assumptions are marked.
PUBLISHED = {
    # arXiv 2407.21783: 419 unexpected and 47 planned interruptions in 54 days. arXiv 2602.00277: a restart
    # on 16K GPUs takes about 200 s. Assumption: a checkpoint every 30 minutes.
    "Llama 3": (16384, 54, 54 * DAY_S / 419, 200, 1800, 47 / 54, 0.90),
    # arXiv 2509.16293, tables 4 and 6: 175 incidents in three months, checkpoints in each step.
    # Assumptions: evictions take 60 s for detection and 93 s as after CUDA errors; hangs and rollbacks
    # take the published maximum of 50 minutes.
    "ByteRobust": (9600, 90, 90 * DAY_S / 175, (128 * 153 + 20 * 57 + 27 * 3000) / 175, 10, 0, 0.97),
    # arXiv 2602.00277: a failure every 18 minutes, which costs 10 minutes, or 3 with fault tolerance.
    # Assumptions: steps repeated are part of this; one of 12 replicas is missing for 10 minutes.
    "all GPUs restart": (98304, 5, 18 * 60, 10 * 60, 1, 0, 0.44),
    "one of 12 replicas": (98304, 5, 18 * 60, 3 * 60 + 7 * 60 / 12, 1, 0, 0.80),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if its[0] > 50_000 else ())
        for name, its in PUBLISHED.items()
    ],
)
def test_published_effective_training_time(name):
    gpus, days, interval_s, restart_s, save_every_s, preemptions, published = PUBLISHED[name]
    report = simulate_run(
        gpus,
        days=days,
        # Publications count failures per wall time, but simulated nodes fail only during training.
        node_mtbf_days=(interval_s - restart_s) / DAY_S * (gpus // 8),
        restart_s=restart_s,
        save_every_s=save_every_s,
        preemptions_per_day=preemptions,
        spare_nodes=gpus // 800,
        time_limit_days=math.inf,
        requeue_hold_s=0,
    )
    assert report.effective == pytest.approx(published, abs=0.02)
    row = next(line for line in DOCS.splitlines() if line.startswith("|") and name in line)
    assert row.endswith(f"| {100 * report.effective:.1f}% |")


def test_run_without_failures_loses_only_its_starts():
    options = ["--run-gpus=64", "--gpus=128", "--days=5", "--node-mtbf=1e9", "--preemptions=0"]
    options += ["--restart-time=600", "--requeue-hold=300", "--json"]
    result = CliRunner().invoke(command, options)
    # Three jobs within the time limit of two days, of which two were requeued.
    lost_s = 3 * 600 + 2 * 300
    ratio = json.loads(result.output)["effective_training_time_ratio"]
    assert ratio == pytest.approx(1 - lost_s / (5 * DAY_S))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--run-gpus=128 --gpus=128 --spare-nodes=1", "--run-gpus is 128, but must be between 8"),
        ("--spare-nodes=1", "--spare-nodes requires --run-gpus"),
        ("--copy-every=60", "--copy-every requires --emergency-checkpoints"),
        ("--preemptions=-1", "'--preemptions': -1.0 is not in the range x>=0"),
        ("--days=0", "'--days': 0.0 is not in the range x>0"),
        ("--bad-nodes=2", "'--bad-nodes': 2.0 is not in the range 0<=x<=1"),
    ],
)
def test_invalid_options(options, message):
    result = CliRunner().invoke(command, options.split())
    assert result.exit_code == 2
    assert message in result.output
