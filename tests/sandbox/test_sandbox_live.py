"""Sandboxes with real jobs."""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.waiting import wait_for

from hpctrain import sandbox
from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.errors import SchedulerError, SpecError
from hpctrain.sandbox import slurm_conf, slurm_sandbox
from hpctrain.sandbox.etc_hosts import HOSTS
from hpctrain.sandbox.layout import ROOT, folder_of

pytestmark = pytest.mark.slurm


@pytest.fixture
def name() -> Iterator[str]:
    """The name of this test's own sandbox; it is taken down at the end."""
    name = f"live-{os.getpid()}"
    try:
        yield name
    finally:
        sandbox.down(name)


def _sandbox_processes(name: str) -> list[ProcessInfo]:
    """Return all processes with the sandbox's folder in their command line or environment."""
    folder = str(folder_of(name))
    return [
        process
        for process in processes()
        if any(folder in word for word in (*process.argv, *process.environ.values()))
    ]


def _host_lines(name: str) -> list[str]:
    """Return the hosts file without the lines of other sandboxes, which may change at any time."""
    lines = HOSTS.read_text().splitlines()
    return [line for line in lines if "# hpctrain sandbox" not in line or line.endswith(f" {name}")]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _text(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def _sbatch(box: sandbox.Sandbox, script: str, log: Path, *options: str) -> str:
    path = log.with_suffix(".sh")
    path.write_text(f"#!/bin/bash\n{script}")
    result = run_command(["sbatch", "--parsable", "-o", log, *options, path], box.env)
    return result.stdout.strip()


def test_up_and_down_beside_another_sandbox_leave_no_trace(slurm, name, tmp_path):
    before = _host_lines(name)
    log = tmp_path / "job.out"
    for _ in range(2):
        box = sandbox.up(name, nodes=2, gpus_per_node=1)
        assert set(box.node_states().values()) == {"idle"}
        assert not set(box.ports) & set(slurm.ports)
        # A task that leaves its session and clears its environment, and a pending job.
        _sbatch(box, "env -i setsid sleep 300 & echo $!; sleep 300", log, "-N2", "--gpus-per-node=1")
        _sbatch(box, "sleep 300", tmp_path / "queued.out", "-N2", "--gpus-per-node=1")
        escaped = int(wait_for(partial(_text, log), 20, "the job's start"))
        assert any(process.pid == escaped for process in processes())
        box.down()
        assert not any(process.pid == escaped for process in processes())
        assert _sandbox_processes(name) == []
        assert not folder_of(name).exists()
        assert _host_lines(name) == before
        log.unlink()
    assert None not in slurm.daemons().values()
    assert sandbox.find(name) is None
    assert sandbox.down(name) is False


def test_repeated_up_keeps_and_repairs_the_sandbox(name: str) -> None:
    box = sandbox.up(name, nodes=1, gpus_per_node=0)
    pids = box.daemons()
    assert sandbox.up(name, nodes=1, gpus_per_node=0).daemons() == pids
    with pytest.raises(SpecError, match=r"1 node × \(8 CPUs, 0 GPUs\), 30 s grace time.*, but 2 nodes"):
        sandbox.up(name, nodes=2, gpus_per_node=0)
    for process in processes():
        if process.pid in (pids["slurmctld"], pids["munged"]):
            process.kill()
    wait_for(lambda: box.daemons()["slurmctld"] is None, 5, "the end of slurmctld")
    repaired = sandbox.up(name, nodes=1, gpus_per_node=0).daemons()
    assert None not in repaired.values()
    assert repaired[f"slurmd {name}-1"] == pids[f"slurmd {name}-1"]


def test_up_after_a_killed_up_starts_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        # As after SIGKILL: no clean-up runs, and no layout was saved.
        patch.setattr(slurm_sandbox, "remove", lambda *_, **__: None)
        patch.setattr(slurm_sandbox.Sandbox, "save", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            sandbox.up(name, nodes=1)
    assert folder_of(name).exists()
    assert sandbox.up(name, nodes=2).node_states() == {f"{name}-1": "idle", f"{name}-2": "idle"}


@pytest.mark.parametrize("remains", ["no plan", "nothing but processes"])
def test_down_removes_the_remains_of_a_crash(name: str, remains: str) -> None:
    before = _host_lines(name)
    box = sandbox.up(name, nodes=1, gpus_per_node=1)
    (box.folder / "sandbox.json").unlink()
    if remains == "nothing but processes":
        run_command(["rm", "-rf", box.folder])
    sandbox.down(name)
    assert _sandbox_processes(name) == []
    assert not folder_of(name).exists()
    assert _host_lines(name) == before


def test_daemon_that_does_not_start_is_reported_with_its_log(name, monkeypatch):
    before = _host_lines(name)
    broken = slurm_conf._SLURM_CONF.replace("StateSaveLocation={folder}/state", "StateSaveLocation=/dev/null")
    monkeypatch.setattr(slurm_conf, "_SLURM_CONF", broken)
    with pytest.raises(
        SchedulerError, match=r"slurmctld exited; last lines of .*slurmctld\.log:\n.*fatal: .*/dev/null"
    ):
        sandbox.up(name, nodes=1, gpus_per_node=0, limit_s=20)
    assert _sandbox_processes(name) == []
    assert not folder_of(name).exists()
    assert _host_lines(name) == before


def test_job_cannot_take_down_its_own_sandbox(slurm: sandbox.Sandbox) -> None:
    code = f"from hpctrain import sandbox; sandbox.down({slurm.name!r})"
    result = run_command(["srun", sys.executable, "-c", code], slurm.env, check=False)
    assert f"This process runs in a job of sandbox {slurm.name}" in result.stderr
    assert None not in slurm.daemons().values()


def test_files_are_readable_for_all_users_except_the_key(slurm: sandbox.Sandbox) -> None:
    plan = slurm
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in (ROOT, plan.conf, plan.munge, plan.munge / "key")
    }
    assert modes == {ROOT.name: 0o755, "slurm.conf": 0o644, "munge": 0o755, "key": 0o400}
