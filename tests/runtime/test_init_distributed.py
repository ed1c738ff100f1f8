"""`init_distributed` without a supervisor: separate hosts, and steps of a real Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator

import pytest
from helpers import SCRIPTS
from helpers.commands import run_command
from helpers.separate_hosts import SeparateHosts, need_separate_hosts

from hpctrain.files import read_json_lines

pytestmark = pytest.mark.ranks

RANK = SCRIPTS / "join_and_sum.py"


@pytest.fixture(scope="module")
def hosts() -> Iterator[SeparateHosts]:
    need_separate_hosts()
    with SeparateHosts(2) as hosts:
        yield hosts


def join_on(hosts: SeparateHosts) -> list[dict[str, object]]:
    """Start one rank per host, as two tasks of a Slurm job step."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": str(time.monotonic_ns() % 2**31),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_LOCALID": "0",
        "OMP_NUM_THREADS": "1",
    }
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                hosts.start(
                    host,
                    [sys.executable, RANK],
                    {**step, "SLURMD_NODENAME": host, "SLURM_PROCID": str(i), "SLURM_NODEID": str(i)},
                )
            )
            for i, host in enumerate(hosts.names)
        ]
        outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [json.loads(out) for out, _ in outputs]


@pytest.mark.extended
def test_gloo_connects_hosts_whose_names_are_loopback_addresses(hosts):
    for host in hosts.names:
        hosts.set_hosts(host, {**{name: hosts.address(name) for name in hosts.names}, host: "127.0.1.1"})
    results = join_on(hosts)
    for result in results:
        assert result["sum"] == [1.0, 2.0]
        assert result["gloo"] == "eth0"
    # Rank 0's store, with a connection to each rank, may open as many files as it needs.
    assert [result["files"] for result in results] == [66, 60]


@pytest.mark.long
def test_trainer_under_plain_srun(slurm, tmp_path):
    """No variable tells the ranks where to connect."""
    script = SCRIPTS / "train_classifier.py"
    env = {**slurm.env, "HPCTRAIN_RUN_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = ["srun", "-N2", "-n3", sys.executable, script, "--epochs", "1"]
    run_command(command, env, cwd=tmp_path, timeout=100)
    assert [record["step"] for record in read_json_lines(tmp_path / "metrics.jsonl")] == list(range(1, 14))
    assert len(list((tmp_path / "samples").iterdir())) == 3
