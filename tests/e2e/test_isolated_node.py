"""A node without network: it keeps running, and the run continues without it."""

from __future__ import annotations

import pytest
from helpers.processes import assert_no_process_left
from helpers.separate_hosts import need_separate_hosts
from helpers.separate_slurm import RemoteRun, SeparateSlurm
from helpers.training_runs import JOB, Run, assert_same_training
from helpers.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.timeout(400)]

COMMAND = [str(JOB), "--dropout", "0"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Run:
    """Without dropout, the number of ranks changes only rounding."""
    run = Run(tmp_path_factory.mktemp("reference") / "run", {})
    run.hpctrain(
        "submit", "--backend", "local", "--ntasks-per-node", "2", "--run-dir", str(run.path), *COMMAND
    )
    assert run.wait() == 0
    return run


@pytest.fixture
def cluster(request: pytest.FixtureRequest):
    """Three nodes; Slurm marks a silent one as down after so many seconds."""
    need_separate_hosts()
    with SeparateSlurm(3, [f"SlurmdTimeout={request.param}"]) as cluster:
        yield cluster


def start(cluster: SeparateSlurm, path) -> RemoteRun:
    run = RemoteRun(path, cluster)
    shape = ["--nodes", "2:3", "--ntasks-per-node", "1", "--hang-timeout", "4"]
    run.hpctrain("submit", *shape, "--run-dir", str(path), *COMMAND, "--step-s", "0.2")
    run.wait_for_step(8)
    return run


@pytest.mark.parametrize("cluster", [300], indirect=True)
def test_supervisor_shrinks_the_run_before_slurm_marks_the_node_down(cluster, reference, tmp_path):
    run = start(cluster, tmp_path / "run")
    victim = run.events("started")[0]["hosts"][2]
    cluster.isolate(victim)
    assert run.wait() == 0
    failure, shrink = run.events("failure")[0], run.events("shrink")[0]
    assert (failure["class"], failure["host"]) == ("node-lost", victim)
    assert (shrink["nodes_before"], shrink["nodes"], shrink["lost"]) == (3, 2, [victim])
    assert run.events("requeue") == []
    assert_same_training(run, reference)
    # Processes there do no harm, and end as soon as Slurm reaches the node.
    cluster.reconnect(victim)
    assert_no_process_left(run.path, 60)


@pytest.mark.parametrize("cluster", [3], indirect=True)
@pytest.mark.parametrize("index", [2, 0], ids=["ranks", "supervisor"])
def test_slurm_marks_the_node_down_and_requeues_the_job(cluster, reference, tmp_path, index):
    """If it is the supervisor's node, there are two supervisors for a while; only one may continue."""
    run = start(cluster, tmp_path / "run")
    victim = run.events("started")[0]["hosts"][index]
    cluster.isolate(victim)
    wait_for(lambda: "down" in cluster.states()[victim], 60, "the node's end in Slurm's eyes")
    assert run.wait() == 0
    assert [event["nodes"] for event in run.events("started")] == [3, 2]
    assert_same_training(run, reference)
    cluster.reconnect(victim)
    assert_no_process_left(run.path, 60)
