"""Planned loss of nodes: the ranks stop only if enough other nodes remain."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from hpctrain import system
from hpctrain.rundir import RunDir
from hpctrain.supervisor.launch.job_step import StopRequested
from hpctrain.supervisor.monitors import NodeDrainMonitor


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
    line = {"host": "n2.cluster", "time": time.time() + 5, "gpu_xids": [[13, 63], []]}
    run.telemetry(0).write_text(json.dumps(line) + "\n")
    cause = "the GPU driver reported Xid 63"
    assert requests(run, {}) == [StopRequested(f"n2: {cause}", {"n2": cause})]
    run.telemetry(0).write_text(json.dumps(line | {"time": time.time() - 60}) + "\n")
    assert requests(run, {}) == []
