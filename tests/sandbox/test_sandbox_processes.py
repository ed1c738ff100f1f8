import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waiting import wait_for

from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.errors import SchedulerError
from hpctrain.sandbox.daemons import NODE_VARIABLE, SANDBOX_VARIABLE, belongs_to_sandbox, kill_all
from hpctrain.sandbox.layout import sandbox_lock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

#: A child in its own session, without any variable, whose parent has one.
_ESCAPE = "env -i setsid sleep 61 & echo $!; exec sleep 62"


def _alive(pid: int) -> bool:
    return any(process.pid == pid for process in processes())


def test_matching_processes_and_their_descendants_are_killed() -> None:
    marker = f"test-{os.getpid()}"
    with (
        subprocess.Popen(
            ["sh", "-c", _ESCAPE], env={**os.environ, "MARK": marker}, stdout=subprocess.PIPE, text=True
        ) as target,
        subprocess.Popen(["sleep", "63"]) as other,
    ):
        assert target.stdout is not None
        escaped = int(target.stdout.readline())
        try:
            kill_all(lambda process: process.environ.get("MARK") == marker, "test")
            assert target.wait(120) == -9
            wait_for(lambda: not _alive(escaped), 5, "the end of the grandchild")
            assert other.poll() is None
        finally:
            other.kill()
            target.kill()


def _process(**environ: str) -> ProcessInfo:
    return ProcessInfo(1, 0, 0, ("x",), environ)


def test_processes_of_a_sandbox_are_recognized(tmp_path: Path) -> None:
    box = tmp_path / "box"
    conf = str(box / "slurm.conf")
    slurmd = _process(**{SANDBOX_VARIABLE: str(box), NODE_VARIABLE: "box-2"})
    rank = _process(SLURM_CONF=conf, SLURMD_NODENAME="box-2")
    users_shell = _process(SLURM_CONF=conf)
    elsewhere = _process(SLURM_CONF="/etc/slurm/slurm.conf", SLURMD_NODENAME="box-2")
    processes_of = {None: [slurmd, rank], "box-2": [slurmd, rank], "box-1": []}
    for node, expected in processes_of.items():
        candidates = (slurmd, rank, users_shell, elsewhere)
        assert [process for process in candidates if belongs_to_sandbox(box, process, node)] == expected


def test_waiting_for_the_lock_has_a_limit(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with (
        sandbox_lock(root),
        pytest.raises(SchedulerError, match="Another sandbox command"),
        sandbox_lock(root, limit_s=0.1),
    ):
        pass
