"""A real cluster, with real jobs on it."""

from __future__ import annotations

import os
import re
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
from hpctrain.sandbox import daemons, etc_hosts, setup, slurm_conf
from hpctrain.sandbox.layout import ROOT, folder_of

pytestmark = pytest.mark.slurm


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a sandbox that this test alone puts up; it is down in the end."""
    name = f"live-{os.getpid()}"
    try:
        yield name
    finally:
        sandbox.down(name)


def _of(name: str) -> list[ProcessInfo]:
    """All processes that know of the sandbox `name`, by command line or by environment."""
    folder = str(folder_of(name))
    return [
        process
        for process in processes()
        if any(folder in word for word in (*process.argv, *process.environ.values()))
    ]


def _host_lines(name: str) -> list[str]:
    """The hosts file without the lines of other sandboxes, which come and go by themselves."""
    lines = etc_hosts.HOSTS.read_text().splitlines()
    return [line for line in lines if "# hpctrain sandbox" not in line or line.endswith(f" {name}")]


def _queue(box: sandbox.Sandbox, job: str) -> str:
    return run_command(["squeue", "-h", "-j", job, "-o", "%T %r"], box.env).stdout.strip()


def _die(*_: object) -> None:
    raise KeyboardInterrupt


def _text(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def _sbatch(box: sandbox.Sandbox, script: str, log: Path, *options: str) -> str:
    path = log.with_suffix(".sh")
    path.write_text(f"#!/bin/bash\n{script}")
    done = run_command(["sbatch", "--parsable", "-o", log, *options, path], box.env)
    return done.stdout.strip()


def test_each_task_gets_its_gpu_on_every_node(slurm: sandbox.Sandbox) -> None:
    say = "echo $SLURMD_NODENAME $SLURM_LOCALID $CUDA_VISIBLE_DEVICES"
    options = ["-N4", "-n8", "--ntasks-per-node=2", "--gpus-per-task=1", "--gpu-bind=none"]
    whole = run_command(["srun", "-N4", "--gpus-per-node=2", "sh", "-c", say], slurm.env)
    assert sorted(whole.stdout.splitlines()) == [f"{node} 0 0,1" for node in slurm.nodes]
    single = run_command(["srun", *options, "sh", "-c", say], slurm.env)
    assert sorted(line.split()[0] for line in single.stdout.splitlines()) == sorted(slurm.nodes * 2)


def test_node_names_resolve(slurm: sandbox.Sandbox) -> None:
    out = run_command(["getent", "hosts", *slurm.nodes]).stdout
    assert dict(reversed(line.split()) for line in out.splitlines()) == slurm.plan.addresses


def test_an_urgent_job_preempts_and_the_other_is_requeued(slurm: sandbox.Sandbox, tmp_path: Path) -> None:
    log = tmp_path / "job.out"
    script = """
echo start ${SLURM_RESTART_COUNT:-0}
srun bash -c 'trap "echo TERM; exit 75" TERM; echo ready; while true; do sleep 0.1; done'
echo srun said $?
scontrol requeue $SLURM_JOB_ID
sleep 30
"""
    job = _sbatch(slurm, script, log, "-N4", "--ntasks-per-node=2", "--gpus-per-node=2")
    try:
        wait_for(lambda: _text(log).count("ready") == 8, 20, "8 tasks")
        run_command(["srun", "-p", "urgent", "-N1", "--gpus-per-node=2", "true"], slurm.env)
        wait_for(lambda: _queue(slurm, job) == "PENDING BeginTime", 10, "the job to be back in the queue")
        assert log.read_text().count("TERM\n") == 8, log.read_text()
        assert "srun said 75" in log.read_text()
        run_command(["scontrol", "update", f"JobId={job}", "StartTime=now+2"], slurm.env)
        wait_for(lambda: "start 1" in log.read_text(), 20, "the second start")
    finally:
        run_command(["scancel", job], slurm.env)
        wait_for(lambda: not _queue(slurm, job).startswith(("RUN", "COMPL")), 20, "the end of the job")


@pytest.mark.long
def test_a_lost_node_is_noticed_and_taken_back(slurm: sandbox.Sandbox, tmp_path: Path) -> None:
    lost = slurm.nodes[2]
    log = tmp_path / "job.out"
    job = _sbatch(
        slurm, "srun bash -c 'echo ready; sleep 100'", log, "-N4", "--no-requeue", "--gpus-per-node=1"
    )
    try:
        wait_for(lambda: _text(log).count("ready") == 4, 20, "4 tasks")
        slurm.kill_node(lost)
        wait_for(
            lambda: slurm.node_states()[lost] == "down*", 60, f"Slurm to notice that {lost} is gone", 0.5
        )
        wait_for(lambda: not _queue(slurm, job).startswith("RUN"), 20, "the end of the job")
        assert slurm.daemons()[f"slurmd {lost}"] is None
    finally:
        slurm.start_node(lost)
        run_command(["scancel", job], slurm.env)
    assert run_command(["srun", "-w", lost, "printenv", "SLURMD_NODENAME"], slurm.env).stdout.strip() == lost


def test_a_node_that_dies_and_is_back_before_slurm_notices(slurm: sandbox.Sandbox) -> None:
    node = slurm.nodes[0]
    slurm.kill_node(node)
    slurm.start_node(node)
    assert run_command(["srun", "-w", node, "printenv", "SLURMD_NODENAME"], slurm.env).stdout.strip() == node


def test_a_node_it_does_not_have(slurm: sandbox.Sandbox) -> None:
    with pytest.raises(SpecError, match=r"has no node 'n9'\. Its nodes are pytest-"):
        slurm.kill_node("n9")


def test_up_and_down_beside_another_leaves_no_trace(
    slurm: sandbox.Sandbox, name: str, tmp_path: Path
) -> None:
    before = _host_lines(name)
    log = tmp_path / "job.out"
    for _ in range(5):
        box = sandbox.up(name, nodes=2, gpus_per_node=1)
        assert set(box.node_states().values()) == {"idle"}
        assert not set(box.plan.ports) & set(slurm.plan.ports)
        # A task that leaves its session and clears its environment; a job that waits.
        _sbatch(box, "env -i setsid sleep 300 & echo $!; sleep 300", log, "-N2", "--gpus-per-node=1")
        _sbatch(box, "sleep 300", tmp_path / "queued.out", "-N2", "--gpus-per-node=1")
        escaped = int(wait_for(partial(_text, log), 20, "the job's start"))
        assert any(process.pid == escaped for process in processes())
        box.down()
        assert not any(process.pid == escaped for process in processes())
        assert _of(name) == []
        assert not folder_of(name).exists()
        assert _host_lines(name) == before
        log.unlink()
    assert None not in slurm.daemons().values()
    assert sandbox.find(name) is None
    assert sandbox.down(name) is False


def test_down_outlasts_a_job_that_ignores_sigterm(name: str, tmp_path: Path) -> None:
    box = sandbox.up(name, nodes=1, gpus_per_node=0)
    log = tmp_path / "job.out"
    _sbatch(box, "trap '' TERM; echo started; while true; do sleep 0.2; done", log)
    wait_for(partial(_text, log), 20, "the job's start")
    box.down()
    assert _of(name) == []


def test_up_twice_keeps_what_is_there_and_mends_it(name: str) -> None:
    box = sandbox.up(name, nodes=1, gpus_per_node=0)
    pids = box.daemons()
    assert sandbox.up(name, nodes=1, gpus_per_node=0).daemons() == pids
    with pytest.raises(SpecError, match=re.escape("1 node × (8 CPUs, 0 GPUs), 30 s grace, but 2 nodes")):
        sandbox.up(name, nodes=2, gpus_per_node=0)
    for process in processes():
        if process.pid in (pids["slurmctld"], pids["munged"]):
            process.kill()
    wait_for(lambda: box.daemons()["slurmctld"] is None, 5, "the end of slurmctld")
    mended = sandbox.up(name, nodes=1, gpus_per_node=0).daemons()
    assert None not in mended.values()
    assert mended[f"slurmd {name}-1"] == pids[f"slurmd {name}-1"]


def test_up_after_an_up_that_was_killed_half_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        # What a SIGKILL leaves: no clean-up runs, and no plan was saved.
        patch.setattr(setup, "remove", lambda *_, **__: None)
        patch.setattr(setup.SandboxLayout, "save", _die)
        with pytest.raises(KeyboardInterrupt):
            sandbox.up(name, nodes=1)
    assert folder_of(name).exists()
    assert sandbox.up(name, nodes=2).node_states() == {f"{name}-1": "idle", f"{name}-2": "idle"}


def test_up_gives_lost_host_lines_back(name: str) -> None:
    box = sandbox.up(name, nodes=1, gpus_per_node=0)
    lines = _host_lines(name)
    etc_hosts.remove_hosts(name)
    sandbox.up(name, nodes=1, gpus_per_node=0)
    assert _host_lines(name) == lines
    assert f"{box.nodes[0]} " in lines[0]


@pytest.mark.parametrize("left", ["an empty folder", "no plan", "nothing but processes"])
def test_the_rest_of_a_crash_is_removed(name: str, left: str) -> None:
    before = _host_lines(name)
    if left == "an empty folder":
        folder_of(name).mkdir(parents=True)
    else:
        box = sandbox.up(name, nodes=1, gpus_per_node=1)
        (box.plan.folder / "sandbox.json").unlink()
        if left == "nothing but processes":
            run_command(["rm", "-rf", box.plan.folder])
    sandbox.down(name)
    assert _of(name) == []
    assert not folder_of(name).exists()
    assert _host_lines(name) == before


def test_a_daemon_that_does_not_come_up_is_named_with_its_log(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _host_lines(name)
    broken = slurm_conf._SLURM_CONF.replace("StateSaveLocation={state}", "StateSaveLocation=/dev/null")
    monkeypatch.setattr(slurm_conf, "_SLURM_CONF", broken)
    with pytest.raises(
        SchedulerError, match=r"slurmctld ended; its log .*slurmctld\.log ends:\n.*fatal: .*/dev/null"
    ):
        sandbox.up(name, nodes=1, gpus_per_node=0, limit_s=20)
    assert _of(name) == []
    assert not folder_of(name).exists()
    assert _host_lines(name) == before


def test_a_daemon_that_refuses_at_once_is_quoted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = slurm_conf._SLURM_CONF.replace("select/cons_tres", "select/nonsense")
    monkeypatch.setattr(slurm_conf, "_SLURM_CONF", broken)
    with pytest.raises(SchedulerError, match=r"(slurmctld|slurmd) .*select/nonsense"):
        sandbox.up(name, nodes=1, gpus_per_node=0, limit_s=20)
    assert _of(name) == []


def test_a_job_cannot_take_its_own_sandbox_down(slurm: sandbox.Sandbox) -> None:
    code = f"from hpctrain import sandbox; sandbox.down({slurm.name!r})"
    done = run_command(["srun", sys.executable, "-c", code], slurm.env, check=False)
    assert f"This process runs in a job of sandbox {slurm.name}" in done.stderr
    assert None not in slurm.daemons().values()


def test_files_are_for_all_users_but_the_key_is_not(slurm: sandbox.Sandbox) -> None:
    plan = slurm.plan
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in (ROOT, plan.conf, plan.munge, plan.munge / "key")
    }
    assert modes == {ROOT.name: 0o755, "slurm.conf": 0o644, "munge": 0o755, "key": 0o400}


def _records(box: sandbox.Sandbox, job: str) -> list[str]:
    """The states of a job in accounting."""
    return run_command(["sacct", "-nXP", "-o", "State", "-j", job], box.env).stdout.split()


def test_accounting_keeps_its_own_records_outlives_its_daemons_and_goes(
    accounting: sandbox.Sandbox, name: str, tmp_path: Path
) -> None:
    box = sandbox.up(name, nodes=1, gpus_per_node=0, accounting=True)
    assert {"mariadbd", "slurmdbd"} < set(box.daemons())
    assert None not in box.daemons().values()
    for daemon in ("mariadbd", "slurmdbd"):
        assert os.stat(f"/proc/{box.daemons()[daemon]}").st_uid != 0
    job = _sbatch(box, "exit 3", tmp_path / "job.out")
    wait_for(lambda: _records(box, job) == ["FAILED"], 20, "the record of the job")
    users = run_command(["sacct", "-nXP", "-S", "now-1hours", "-o", "Cluster"], accounting.env).stdout.split()
    assert name not in users

    pids = box.daemons()
    for process in processes():
        if process.pid in (pids["mariadbd"], pids["slurmdbd"]):
            process.kill()
    wait_for(lambda: box.daemons()["slurmdbd"] is None, 5, "the end of slurmdbd")
    assert None not in sandbox.up(name, nodes=1, gpus_per_node=0, accounting=True).daemons().values()
    assert _records(box, job) == ["FAILED"]
    box.down()
    assert _of(name) == []
    assert not folder_of(name).exists()
    assert None not in accounting.daemons().values()


def test_a_database_that_does_not_come_up_is_named_with_its_log(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        daemons, "mariadbd_argv", lambda plan: ("mariadbd", "--no-defaults", "--datadir=/nowhere")
    )
    with pytest.raises(
        SchedulerError, match=r"mariadbd ended; its log .*mariadbd\.log ends:\n(.*\n)*.*/nowhere"
    ):
        sandbox.up(name, nodes=1, gpus_per_node=0, accounting=True)
    assert _of(name) == []
    assert not folder_of(name).exists()


def test_without_accounting_sacct_says_so(slurm: sandbox.Sandbox) -> None:
    done = run_command(["sacct"], slurm.env, check=False)
    assert done.returncode == 1
    assert "accounting storage is disabled" in done.stderr
