"""A run is submitted, preempted, requeued and resumed with each Slurm version."""

from collections.abc import Iterator

import pytest
from helpers.commands import run_command
from helpers.slurm_versions import SLURM_VERSIONS, new_cluster
from helpers.training_runs import LAST_STEP, check_preempted_run_continues, submit
from helpers.waiting import wait_for

from hpctrain.sandbox import Sandbox

pytestmark = pytest.mark.slow


@pytest.fixture(params=SLURM_VERSIONS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with new_cluster("pytest-v", nodes=1, gpus_per_node=1, slurm=request.param) as cluster:
        yield cluster


@pytest.mark.extended
def test_preempted_run_continues(cluster: Sandbox, tmp_path) -> None:
    version = run_command(["sbatch", "--version"], cluster.env).stdout.split()[1]
    assert version.startswith(SLURM_VERSIONS)
    run = submit(tmp_path / "run", cluster.env, ["--nodes", "1", "--gpus-per-node", "1"], step_s=0.1)
    check_preempted_run_continues(run, cluster)


@pytest.fixture(scope="module")
def expediting() -> Iterator[Sandbox]:
    """A cluster that starts requeued jobs without a delay."""
    settings = ["SlurmctldParameters=enable_expedited_requeue"]
    with new_cluster("pytest-x", nodes=2, gpus_per_node=1, slurm="26.05", settings=settings) as cluster:
        yield cluster


@pytest.mark.long
def test_requeued_job_is_expedited(expediting: Sandbox, tmp_path) -> None:
    run = submit(tmp_path / "run", expediting.env, ["--nodes", "1", "--gpus-per-node", "1"], step_s=0.1)
    assert "#SBATCH --requeue=expedite\n" in run.dir.job_script.read_text()
    run.wait_for_step(2)
    run.hpctrain("requeue", str(run.path))
    # Neither `status` nor `wait` runs here: they would shorten the usual delay of two minutes.
    wait_for(lambda: run.events("resumed"), 100, "the next start")
    assert run.wait() == 0


@pytest.mark.long
def test_lost_batch_host_delays_no_expedited_run(expediting: Sandbox, tmp_path) -> None:
    run = submit(tmp_path / "run", expediting.env, ["--nodes", "1", "--gpus-per-node", "1"], step_s=0.2)
    run.wait_for_step(8)
    (started,) = run.events("started")
    (host,) = started["hosts"]
    expediting.kill_node(host)
    wait_for(lambda: run.events("resumed"), 100, "the next start")
    expediting.start_node(host)
    assert run.wait() == 0
    assert sorted(run.losses()) == list(range(1, LAST_STEP + 1))
