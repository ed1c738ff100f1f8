"""A run is submitted, preempted, requeued and resumed with each Slurm version."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.commands import run_command
from helpers.slurm_versions import SLURM_VERSIONS, need_slurm_version
from helpers.training_runs import check_preempted_run_continues, submit

from hpctrain import sandbox

pytestmark = pytest.mark.slow


@pytest.fixture(params=SLURM_VERSIONS)
def cluster(request: pytest.FixtureRequest) -> Iterator[sandbox.Sandbox]:
    need_slurm_version(request.param)
    name = f"pytest-v{os.getpid()}"
    try:
        yield sandbox.up(name, nodes=1, gpus_per_node=1, slurm=request.param)
    finally:
        sandbox.down(name)


def test_preempted_run_continues(cluster: sandbox.Sandbox, tmp_path) -> None:
    version = run_command(["sbatch", "--version"], cluster.env).stdout.split()[1]
    assert version.startswith(f"{cluster.shape.slurm}.")
    run = submit(tmp_path / "run", cluster.env, ["--nodes", "1", "--gpus-per-node", "1"], step_s=0.1)
    check_preempted_run_continues(run, cluster)
