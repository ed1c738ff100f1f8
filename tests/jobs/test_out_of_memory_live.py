"""Jobs that use too much memory, under a real Slurm that limits it by cgroups."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.batch_jobs import SlurmJobs
from helpers.commands import environment
from helpers.waiting import wait_for

from hpctrain import sandbox
from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.jobs.submit.submit import submit_prepared
from hpctrain.slurm.states import RunState

GROUPS = Path("/sys/fs/cgroup/memory")
#: cgroup.conf(5) for cgroup v1, which works without systemd.
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\n"

ALLOCATE_FOREVER = (
    "import time\neaten = []\nwhile True:\n    eaten.append(b'x' * 20_000_000)\n    time.sleep(0.005)\n"
)
ALLOCATE_ON_RANK_1 = (
    f"import os, time\ntime.sleep(60 if os.environ['RANK'] != '1' else 0)\n{ALLOCATE_FOREVER}"
)


@pytest.fixture
def limited_cluster() -> Iterator[SlurmJobs]:
    """A cluster of one node that kills jobs above their requested memory."""
    if not (GROUPS / "tasks").exists() or not os.access(GROUPS, os.W_OK):
        pytest.skip(f"needs control groups of the first version for memory, and {GROUPS} is none to write to")
    name = f"memory-{os.getpid()}"
    try:
        box = sandbox.up(name, nodes=1, gpus_per_node=0, settings=("SelectTypeParameters=CR_Core_Memory",))
        box.conf.write_text(box.conf.read_text().replace("TaskPlugin=task/none", "TaskPlugin=task/cgroup"))
        box.conf.with_name("cgroup.conf").write_text(CGROUP_CONF)
        box.kill_node(box.nodes[0])
        box.start_node(box.nodes[0])
        yield SlurmJobs(box, environment(box.env))
    finally:
        sandbox.down(name)
        # slurmd does not remove the group of its node, nor those of steps that were killed with it.
        for group in sorted(GROUPS.glob(f"slurm_{name}-*/**"), reverse=True):
            group.rmdir()


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.timeout(240)
def test_out_of_memory_of_a_job_and_of_a_rank_is_reported(limited_cluster, tmp_path):
    eating_script = tmp_path / "eats.py"
    eating_script.write_text(ALLOCATE_FOREVER)
    job = limited_cluster.submit(tmp_path / "job", f"{sys.executable} {eating_script}", "--mem=100M")

    ranks = tmp_path / "ranks.py"
    ranks.write_text(ALLOCATE_ON_RANK_1)
    options = {"ntasks_per_node": 2, "mem": "900M", "max_failures": 1, "run_dir": "r", "backend": "slurm"}
    run = submit_prepared(
        prepare_submission(
            ranks, (), options, environ=limited_cluster.environ, cwd=tmp_path, python=sys.executable
        )
    )
    wait_for(lambda: job.status().state.ended, 30, "the end of the job")
    assert (job.status().state, job.status().job_state) == (RunState.FAILED, "OUT_OF_MEMORY")
    assert job.status().cause == "Slurm reports OUT_OF_MEMORY before any rank started"
    assert "State=OUT_OF_MEMORY" in limited_cluster.command("scontrol", "show", "job", job.job_id)

    status = run.wait_for_end(timeout=150)
    assert status.state is RunState.FAILED
    assert f"rank 1 on {limited_cluster.box.nodes[0]}: SIGKILL: out of memory: the job exceeded" in str(
        status.cause
    )
