"""Copy of the emergency checkpoint from the memory of the nodes to the run folder, before a requeue."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from hpctrain.rundir import RunDir
from hpctrain.supervisor.drain_step import keep_emergency_checkpoint
from hpctrain.supervisor.launch.job_step import StepEnded


class Launcher:
    """Runs the command of a step on two ranks of each node, with a folder as the memory of each node."""

    address = "127.0.0.1"

    def __init__(self, memory):
        self.hosts, self.memory = ["n1", "n2"], memory

    def start(self, command, variables, emit):
        codes = []
        for node, host in enumerate(self.hosts):
            for local_rank in (0, 1):
                own = [word.replace("/dev/shm", str(self.memory / host)) for word in command]
                ranks = {"SLURM_LOCALID": str(local_rank), "SLURM_NODEID": str(node)}
                codes.append(subprocess.run(own, env=ranks, timeout=120, check=False).returncode)
        emit(StepEnded(max(codes)))
        return SimpleNamespace(close=lambda: None)


@pytest.fixture
def launcher(tmp_path):
    for number, host in enumerate(("n1", "n2")):
        folder = tmp_path / host / "hpctrain-run-emergency"
        folder.mkdir(parents=True)
        (folder / "run").symlink_to(tmp_path)
        (folder / f"record-000-a-{number:05d}").write_text(host)
    state = tmp_path / "n2" / "hpctrain-run-emergency" / "state-000-a" / "step-00000007"
    state.mkdir(parents=True)
    (state / "manifest.json").write_text("{}")
    return Launcher(tmp_path)


def keep(run, launcher, lost=()):
    return keep_emergency_checkpoint(run, launcher, "/dev/shm/hpctrain-run-emergency", 0, lost)


def test_each_node_copies_its_files_once(tmp_path, launcher):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    assert keep(run, launcher)
    files = sorted(str(each.relative_to(run.path)) for each in run.path.rglob("*") if each.is_file())
    assert files == [
        "emergency/0/record-000-a-00000",
        "emergency/1/record-000-a-00001",
        "emergency/1/state-000-a/step-00000007/manifest.json",
    ]


def test_lost_nodes_copy_nothing(tmp_path, launcher):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    assert keep(run, launcher, lost={"n1"})
    assert [each.name for each in run.emergency.glob("*/record-*")] == ["record-000-a-00001"]
    assert not keep(run, launcher, lost={"n1", "n2"})


def test_a_failed_copy_is_reported(tmp_path, launcher, caplog):
    run = RunDir(tmp_path / "run")
    run.path.write_text("a file")
    assert not keep(run, launcher)
    assert "so the run resumes from its newest regular checkpoint" in caplog.text
