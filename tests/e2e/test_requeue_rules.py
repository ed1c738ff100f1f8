"""Sites with other requeue rules behave as preflight and documentation say."""

from collections.abc import Iterator

import pytest
from helpers.processes import assert_no_process_left
from helpers.slurm_versions import new_cluster
from helpers.training_runs import preempt, submit

from hpctrain.sandbox import Sandbox

SHAPE = ["--nodes", "2", "--gpus-per-node", "1", "--time", "30"]

pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A cluster whose preemptible partition has the given settings."""
    job_requeue, mode, grace_s = request.param
    partition = "PartitionName=preemptible Nodes=ALL Default=YES PriorityTier=1"
    settings = [
        f"JobRequeue={job_requeue}",
        f"PreemptMode={mode}",
        f"{partition} PreemptMode={mode} GraceTime={grace_s}",
    ]
    with new_cluster("rules", nodes=2, gpus_per_node=1, settings=settings) as cluster:
        yield cluster


@pytest.mark.parametrize("site", [(0, "REQUEUE", 30), (1, "CANCEL", 30)], indirect=True, ids=str)
def test_preempted_run_is_requeued(site, tmp_path):
    run = submit(tmp_path / "run", site.env, SHAPE, step_s=0.2)
    run.wait_for_step(8)
    preempt(run.env, nodes=2)
    assert run.wait() == 0
    assert len(run.events("requeue")) == 1
    assert_no_process_left(run.path)


@pytest.mark.parametrize("site", [(1, "CANCEL", 0)], indirect=True, ids=str)
def test_run_cancelled_without_grace_saves_and_continues_in_a_successor(site, tmp_path):
    run = submit(tmp_path / "run", site.env, SHAPE, step_s=0.2)
    run.wait_for_step(8)
    preempt(run.env, nodes=2)
    assert run.wait() == 0
    stop = run.events("signal")[0]
    assert (run.events("requeue")[0]["by"], stop["saved"]) == ("successor", True)
    assert run.events("resumed")[0]["step"] == stop["step"]
    assert len(run.events("submitted")) == 2
    assert_no_process_left(run.path)
