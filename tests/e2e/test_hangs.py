"""A rank that hangs before the all-reduce is detected, reported and restarted."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from helpers.processes import assert_no_process_left
from helpers.training_runs import JOB, Run, assert_undisturbed

LOCAL = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "1", "--set", "node_check=never"]
NODES = ["--nodes", "2", "--gpus-per-node", "1"]


def submit(path: Path, env: dict[str, str], shape: list[str], *args: str) -> Run:
    run = Run(path, env)
    options = ["--hang-timeout", "3", "--run-dir", str(path)]
    run.hpctrain("submit", *shape, *options, str(JOB), "--checkpoint-every", "6", *args)
    return run


def hang(tmp_path: Path, env: dict[str, str], shape: list[str], mode: str, *args: str) -> tuple[Run, dict]:
    """Run to the end; return the run and the recorded hang."""
    run = submit(tmp_path / "run", env, shape, "--hang", mode, *args)
    assert run.wait() == 0
    (failure,) = run.events("failure")
    assert (failure["class"], failure["rank"]) == ("hang", 1)
    assert_no_process_left(run.path)
    return run, failure


@pytest.mark.long
def test_rank_in_endless_loop_is_reported_with_its_line(tmp_path):
    # The first save takes long, and would extend the supervisor's timeout.
    run, failure = hang(tmp_path, {}, LOCAL, "loop", "--checkpoint-every", "100", "--epochs", "1")
    assert "rank 1 on local-1 is in never_return (hang.py:" in failure["cause"]
    assert "1 of 2 ranks waiting in" in failure["cause"]
    assert "in never_return" in run.dir.stacks(0, 1).read_text()
    assert "in never_return" not in run.dir.stacks(0, 0).read_text()
    assert "Thread" in run.dir.stacks(0, 0).read_text()


@pytest.mark.long
def test_unresponsive_rank_prints_its_stack(tmp_path):
    run, failure = hang(tmp_path, {}, LOCAL, "frozen")
    assert "rank 1 on local-1 is not responding" in failure["cause"]
    assert "in never_return" in run.dir.rank_log(0, 1).read_text()


@pytest.fixture(scope="module")
def reference(slurm, tmp_path_factory) -> Run:
    run = submit(tmp_path_factory.mktemp("reference") / "run", slurm.env, NODES)
    assert run.wait() == 0
    return run


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["loop", "sleep", "frozen", "stopped"])
def test_hang_on_slurm_is_detected_and_the_run_restarted(slurm, reference, tmp_path, mode):
    run, failure = hang(tmp_path, slurm.env, NODES, mode)
    assert_undisturbed(run, reference)
    state = "is not responding" if mode in ("frozen", "stopped") else "is in never_return"
    assert f"rank 1 on {failure['host']} {state}" in failure["cause"]


@pytest.mark.extended
def test_suspended_ranks_neither_hang_nor_train(tmp_path):
    run = Run(tmp_path / "run", {})
    run.hpctrain("submit", *LOCAL, "--run-dir", str(run.path), str(JOB), "--step-s", "0.1")
    run.wait_for_step(4)
    pids = [process.pid for process in run.ranks().values()]
    for number, pause_s in ((signal.SIGSTOP, 15.0), (signal.SIGCONT, 0.0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(pause_s)
    assert run.wait() == 0
    (pause,) = run.events("paused")
    assert 11 < pause["seconds"] < 60
    assert run.events("failure") == run.events("straggler") == []
    report = json.loads(run.hpctrain("report", str(run.path), "--json").stdout)
    (idle_us,) = (entry["us"] for entry in report["ledger"] if entry["what"] == "idle")
    assert idle_us > 10e6
