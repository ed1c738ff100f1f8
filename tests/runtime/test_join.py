"""Joining without a supervisor: separate hosts, and steps of a real Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from helpers import SCRIPTS
from helpers.commands import run_command
from helpers.separate_hosts import SeparateHosts, need_separate_hosts
from torch.distributed import TCPStore

from hpctrain.files import read_json_lines

pytestmark = pytest.mark.ranks

RANK = SCRIPTS / "join_and_sum.py"


@pytest.fixture(scope="module")
def hosts() -> Iterator[SeparateHosts]:
    need_separate_hosts()
    with SeparateHosts(2) as hosts:
        yield hosts


def join_on(hosts: SeparateHosts) -> list[dict[str, object]]:
    """One rank a host, as two tasks of a job step of Slurm."""
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


def test_gloo_crosses_hosts_whose_own_names_are_loopback_addresses(hosts):
    for host in hosts.names:
        hosts.set_hosts(host, {**{name: hosts.address(name) for name in hosts.names}, host: "127.0.1.1"})
    ends = join_on(hosts)
    for end in ends:
        assert end["sum"] == [1.0, 2.0]
        assert end["gloo"] == "eth0"
    # Rank 0's store, which has a connection to each rank, may have as many as it needs.
    assert [end["files"] for end in ends] == [66, 60]


@pytest.mark.long
def test_gloo_crosses_hosts_of_ipv6_only(hosts):
    for host in hosts.names:
        hosts.set_hosts(host, {name: hosts.address6(name) for name in hosts.names})
    assert [end["sum"] for end in join_on(hosts)] == [[1.0, 2.0]] * 2


@pytest.mark.long
@pytest.mark.parametrize(("num_nodes", "num_ranks"), [(2, 3), (4, 8)], ids=str)
def test_the_trainer_under_a_bare_srun(slurm, tmp_path, num_nodes, num_ranks):
    """Nobody tells the ranks where to meet."""
    script = SCRIPTS / "train_classifier.py"
    env = {**slurm.env, "HPCTRAIN_RUN_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = ["srun", f"-N{num_nodes}", f"-n{num_ranks}", sys.executable, script, "--epochs", "1"]
    run_command(words, env, cwd=tmp_path, timeout=100)
    assert [record["step"] for record in read_json_lines(tmp_path / "metrics.jsonl")] == list(range(1, 14))
    assert len(list((tmp_path / "samples").iterdir())) == num_ranks


def test_the_store_does_without_strangers():
    """Such as ranks of another step that look for their rank 0 at this port, before it opens and after."""
    limit = timedelta(seconds=20)
    words = b'{"token": "0123456789abcdef", "rank": 0, "left_s": 29.9}\n'
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as strangers:
        where = listener.getsockname()

        def knock() -> None:
            strangers.enter_context(socket.create_connection(where, timeout=5)).sendall(words)

        knock()
        held = TCPStore(
            *where,
            2,
            is_master=True,
            wait_for_workers=False,
            timeout=limit,
            master_listen_fd=listener.detach(),
        )
        knock()
        visitor = TCPStore(*where, 2, is_master=False, wait_for_workers=False, timeout=limit)
        knock()
        visitor.set("key", "value")
        assert held.get("key") == b"value"
