"""Jobs that take more memory than they have, under a real Slurm that limits it by control groups."""

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
#: cgroup.conf(5); the first version of groups, for which a group of ours has no need of systemd.
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\n"

EATS = "import time\neaten = []\nwhile True:\n    eaten.append(b'x' * 20_000_000)\n    time.sleep(0.005)\n"
RANK_1_EATS = f"import os, time\ntime.sleep(60 if os.environ['RANK'] != '1' else 0)\n{EATS}"


@pytest.fixture
def limited() -> Iterator[SlurmJobs]:
    """A cluster of one node, on which a job that takes more memory than it asked for is killed."""
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
        # slurmd leaves the group of its node.
        for group in GROUPS.glob(f"slurm_{name}-*"):
            group.rmdir()


@pytest.mark.long
@pytest.mark.slurm
def test_a_job_and_a_rank_that_run_out_of_memory_say_so(limited, tmp_path):
    eats = tmp_path / "eats.py"
    eats.write_text(EATS)
    job = limited.submit(tmp_path / "job", f"{sys.executable} {eats}", "--mem=100M")

    ranks = tmp_path / "ranks.py"
    ranks.write_text(RANK_1_EATS)
    options = {"ntasks_per_node": 2, "mem": "900M", "max_failures": 1, "run_dir": "r", "backend": "slurm"}
    run = submit_prepared(
        prepare_submission(ranks, (), options, environ=limited.environ, cwd=tmp_path, python=sys.executable)
    )
    wait_for(lambda: job.status().state.ended, 30, "the end of the job")
    assert (job.status().state, job.status().job_state) == (RunState.FAILED, "OUT_OF_MEMORY")
    assert job.status().cause == "Slurm reports OUT_OF_MEMORY before any rank started"
    assert "State=OUT_OF_MEMORY" in limited.command("scontrol", "show", "job", job.job_id)

    status = run.wait_for_end(timeout=60)
    assert status.state is RunState.FAILED
    assert f"rank 1 on {limited.box.nodes[0]}: SIGKILL: out of memory: the rank exceeded" in str(status.cause)
