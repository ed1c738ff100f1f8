"""A run is submitted, preempted, requeued and resumed with each Slurm version."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.slurm_versions import SLURM_VERSIONS, need_slurm_version
from helpers.training_runs import LAST_STEP, preempt, submit

from hpctrain import sandbox

pytestmark = pytest.mark.slow


@pytest.fixture(params=SLURM_VERSIONS)
def cluster(request: pytest.FixtureRequest) -> Iterator[sandbox.Sandbox]:
    need_slurm_version(request.param)
    name = f"version-{os.getpid()}"
    try:
        yield sandbox.up(name, nodes=1, gpus_per_node=1, slurm=request.param)
    finally:
        sandbox.down(name)


def test_preempted_run_continues(cluster: sandbox.Sandbox, tmp_path) -> None:
    version = run_command(["sbatch", "--version"], cluster.env).stdout.split()[1]
    assert version.startswith(f"{cluster.shape.slurm}.")
    run = submit(tmp_path / "run", cluster.env, ["--nodes", "1", "--gpus-per-node", "1"], step_s=0.1)
    run.wait_for_step(2)
    preempt(cluster.env, nodes=1, seconds=0)
    assert run.wait() == 0
    (stop,), (resumed,) = run.events("signal"), run.events("resumed")
    assert (stop["signal"], stop["saved"], len(run.events("requeue"))) == ("SIGTERM", True, 1)
    assert resumed["step"] == stop["step"] < LAST_STEP
    assert sorted(run.losses()) == list(range(1, LAST_STEP + 1))
    assert_no_process_left(run.path)
