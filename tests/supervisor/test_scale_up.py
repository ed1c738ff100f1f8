"""Scaling up: requests for a larger allocation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers.waiting import wait_for

from hpctrain.errors import SchedulerError
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir
from hpctrain.supervisor import monitors
from hpctrain.supervisor.monitors import ScaleUpMonitor, should_scale_up


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
    monkeypatch.setattr(monitors, "_FREE_INTERVAL_S", 0.01)
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
