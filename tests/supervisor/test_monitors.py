"""Monitors of an attempt: draining nodes, free nodes, and trials that lose."""

import json
import queue
import time
from types import SimpleNamespace

import pytest
from helpers.waiting import wait_for

from hpctrain import system
from hpctrain.errors import SchedulerError
from hpctrain.files import read_json_lines
from hpctrain.rundir import STOPPED_EARLY, RunDir
from hpctrain.supervisor.launch.job_step import StopRequested
from hpctrain.supervisor.monitors import early_stopping_monitor, scale_up_monitor
from hpctrain.supervisor.monitors.early_stopping_monitor import EarlyStoppingMonitor
from hpctrain.supervisor.monitors.node_drain_monitor import NodeDrainMonitor
from hpctrain.supervisor.monitors.scale_up_monitor import ScaleUpMonitor, should_scale_up
from hpctrain.supervisor.run_end import finish_run
from hpctrain.sweeps.stopping_rules import StoppingRule
from hpctrain.sweeps.sweep_record import SweepRecord


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path)
    run.telemetry(0).parent.mkdir()
    return run


def requests(run, draining, *, hosts=("n1", "n2"), spares=(), min_nodes=1) -> list[object]:
    """Check once, and return the requests to the ranks."""
    control = SimpleNamespace(draining=lambda hosts: dict(draining), own_host="n1")
    events = system.SimpleQueue()
    monitor = NodeDrainMonitor(
        run,
        SimpleNamespace(min_nodes=min_nodes, scale_up_after_s=0.01),
        SimpleNamespace(nodes=control),
        0,
        SimpleNamespace(hosts=list(hosts), spares=list(spares)),
        events,
    )
    monitor.first_s = 0.0
    with monitor:
        assert monitor.check() is not events.empty()
    return [] if events.empty() else [events.get()]


@pytest.mark.parametrize(
    ("draining", "nodes", "stops"),
    [
        ({}, {}, False),
        ({"n2": "DRAIN"}, {}, True),
        ({"n2": "DRAIN"}, {"min_nodes": 2}, False),
        ({"n2": "DRAIN"}, {"min_nodes": 2, "spares": ["n3"]}, True),
        ({"n2": "DRAIN", "n3": "DRAIN"}, {"min_nodes": 2, "spares": ["n3"]}, False),
        ({"n3": "DRAIN"}, {"min_nodes": 2, "spares": ["n3"]}, False),
        ({"n1": "DRAIN"}, {}, False),  # the node of the supervisor
    ],
)
def test_ranks_leave_a_draining_node_if_enough_others_remain(run, draining, nodes, stops):
    found = requests(run, draining, **nodes)
    assert len(found) == stops
    assert run.is_asked_to_requeue(0) is stops
    if stops:
        assert found[0].draining == {"n2": "DRAIN"}


def test_ranks_leave_a_node_whose_gpu_reports_a_fault(run):
    line = {"host": "n2.cluster", "time": time.time() + 5, "gpu_xids": [[13, 63]], "step": 1}
    run.telemetry(0).write_text(json.dumps(line) + "\n")
    cause = "the GPU driver reported Xid 63"
    assert requests(run, {}) == [StopRequested(f"n2: {cause}", {"n2": cause})]
    run.telemetry(0).write_text(json.dumps(line | {"time": time.time() - 60}) + "\n")
    assert requests(run, {}) == []


@pytest.mark.parametrize(
    ("nodes", "new_nodes", "left_s", "pause_s", "worth"),
    [
        (2, 4, 3600, 180, True),
        # 4 × (400 − 180) = 880 = 1.1 × 2 × 400: exactly the margin.
        (2, 4, 400, 180, False),
        (2, 4, 401, 180, True),
        (3, 4, 3600, 180, True),
        (31, 32, 86400, 180, False),
        (4, 4, 86400, 180, False),
        (2, 4, 180, 180, False),
        (2, 4, 10, 180, False),
    ],
)
def test_scale_up_must_be_worth_the_pause(nodes, new_nodes, left_s, pause_s, worth):
    assert should_scale_up(nodes, new_nodes, left_s, pause_s) is worth


@pytest.mark.parametrize("refusals", [0, 1])
def test_free_nodes_stop_the_ranks_for_a_requeue(monkeypatch, tmp_path, refusals):
    """If Slurm refuses the signal, it is sent again."""
    monkeypatch.setattr(scale_up_monitor, "_FREE_INTERVAL_S", 0.01)
    run, requests = RunDir(tmp_path), []

    def stop_ranks():
        requests.append(run.requeue_request.read_text())
        if len(requests) <= refusals:
            raise SchedulerError("no rank is running")

    nodes = SimpleNamespace(num_free=lambda excluded: 3, stop_ranks=stop_ranks)
    job_control = SimpleNamespace(nodes=nodes, seconds_left=lambda: None)
    spec = SimpleNamespace(scale_up_after_s=0.01, nodes=4, resume_mode="auto")
    with ScaleUpMonitor(run, spec, job_control, attempt=2, num_nodes=2):
        wait_for(lambda: len(requests) == refusals + 1, 10, "the signal")
    assert requests == ["2\n"] * (refusals + 1)
    grow = [event for event in read_json_lines(run.events) if event["kind"] == "grow"][-1]
    assert (grow["nodes_before"], grow["nodes"]) == (2, 4)
    assert run.is_asked_to_requeue(2)


@pytest.fixture
def trials(tmp_path, monkeypatch) -> list[RunDir]:
    """Three trials of a sweep with ASHA; two have reported losses of 1 and 2 at step 10."""
    monkeypatch.setattr(early_stopping_monitor, "_TRIAL_INTERVAL_S", 0.01)
    array = RunDir(tmp_path / "sweep")
    trials = [array.task(number) for number in range(3)]
    for trial in trials:
        trial.path.mkdir(parents=True)
        trial.events.touch()
    rule = StoppingRule("asha", "loss", "min", 10, 3)
    array.sweep.write_text(SweepRecord(args=(), space={"lr": "0:3"}, folder="/", stopping=rule).text())
    for number in (0, 1):
        line = {"step": 10, "best": number + 1.0, "mean": number + 1.0}
        trials[number].storage.append(trials[number].early_stopping, line)
    return trials


def test_losing_trial_is_stopped_with_a_reason(trials):
    events: queue.SimpleQueue = queue.SimpleQueue()
    with EarlyStoppingMonitor(trials[2], events):
        for step in range(1, 12):
            trials[2].storage.append(trials[2].metrics, {"step": step, "loss": 5 - step / 10})
        request = events.get(timeout=120)
    assert request == StopRequested(
        "stopped early at step 10 by ASHA: 2 trials of 3 had a better loss than 4, and the best 1 continue"
    )
    assert trials[2].early_stop_reason() == request.reason
    assert finish_run(trials[2], "CANCELLED") == 0
    end = list(read_json_lines(trials[2].events))[-1]
    assert (end["state"], end["note"]) == (STOPPED_EARLY, request.reason)
    # The user resumes the trial.
    with EarlyStoppingMonitor(trials[2], events), pytest.raises(queue.Empty):
        events.get(timeout=0.3)


def test_better_trial_continues_until_others_overtake_it(trials):
    events: queue.SimpleQueue = queue.SimpleQueue()
    with EarlyStoppingMonitor(trials[1], events):
        with pytest.raises(queue.Empty):
            events.get(timeout=0.3)
        trials[2].storage.append(trials[2].early_stopping, {"step": 10, "best": 0.5, "mean": 0.5})
        assert "by ASHA" in events.get(timeout=120).reason


def test_damaged_records_do_not_stop_a_trial(trials):
    events: queue.SimpleQueue = queue.SimpleQueue()
    for line in ("{", "{}", '{"step": "x", "best": 0, "mean": 0}', '{"step": 10, "best": [], "mean": 0}'):
        with trials[0].early_stopping.open("a") as file:
            file.write(line + "\n")
    with EarlyStoppingMonitor(trials[1], events), pytest.raises(queue.Empty):
        events.get(timeout=0.3)
    trials[0].array.sweep.write_text("{")
    with EarlyStoppingMonitor(trials[1], events), pytest.raises(queue.Empty):
        events.get(timeout=0.3)
