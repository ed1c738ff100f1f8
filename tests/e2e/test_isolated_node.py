"""A node without network: it keeps running, and the run continues without it."""

from __future__ import annotations

import pytest
from helpers.processes import assert_no_process_left
from helpers.separate_hosts import need_separate_hosts
from helpers.separate_slurm import SeparateSlurm
from helpers.training_runs import Run, assert_undisturbed, submit
from helpers.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture
def cluster(request: pytest.FixtureRequest):
    """Three nodes; Slurm marks a silent one as down after so many seconds."""
    need_separate_hosts()
    with SeparateSlurm(3, [f"SlurmdTimeout={request.param}"]) as cluster:
        yield cluster


def isolate(cluster: SeparateSlurm, path, index: int) -> tuple[Run, str]:
    """Isolate a node of a run; return the run and the node."""
    shape = ["--nodes", "2:3", "--ntasks-per-node", "1", "--hang-timeout", "4"]
    no_dropout = ["--dropout", "0"]
    run = submit(path, cluster.env, shape, step_s=0.2, further=no_dropout, call=cluster.call_hpctrain)
    run.wait_for_step(8)
    victim = run.events("started")[0]["hosts"][index]
    cluster.isolate(victim)
    return run, victim


def reconnect_and_check(cluster: SeparateSlurm, run: Run, victim: str, reference) -> None:
    """Processes on the node do no harm, and end as soon as Slurm reaches it."""
    cluster.reconnect(victim)
    assert_no_process_left(run.path, 60)
    assert_undisturbed(run, reference(2, "--dropout", "0"), rounding=True)


@pytest.mark.parametrize("cluster", [300], indirect=True)
def test_supervisor_shrinks_the_run_before_slurm_marks_the_node_down(cluster, reference, tmp_path):
    run, victim = isolate(cluster, tmp_path / "run", 2)
    assert run.wait() == 0
    failure, shrink = run.events("failure")[0], run.events("shrink")[0]
    assert (failure["class"], failure["host"]) == ("node-lost", victim)
    assert (shrink["nodes_before"], shrink["nodes"], shrink["lost"]) == (3, 2, [victim])
    assert run.events("requeue") == []
    reconnect_and_check(cluster, run, victim, reference)


@pytest.mark.parametrize("cluster", [3], indirect=True)
@pytest.mark.parametrize("index", [2, 0], ids=["ranks", "supervisor"])
def test_slurm_marks_the_node_down_and_requeues_the_job(cluster, reference, tmp_path, index):
    """If it is the supervisor's node, there are two supervisors for a while; only one may continue."""
    run, victim = isolate(cluster, tmp_path / "run", index)
    wait_for(lambda: "down" in cluster.states()[victim], 60, "the node's end in Slurm's eyes")
    assert run.wait() == 0
    assert [event["nodes"] for event in run.events("started")] == [3, 2]
    reconnect_and_check(cluster, run, victim, reference)
