"""Runs without Slurm: two emulated nodes on this machine."""

import os
import signal
import sys

import pytest
from helpers.processes import assert_no_process_left
from helpers.terminal import Terminal
from helpers.training_runs import LAST_STEP, Run, assert_undisturbed, submit

SHAPE = ["--backend", "local", "--nodes", "2", "--gpus-per-node", "2"]
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_time_limit(reference, tmp_path):
    run = submit(
        tmp_path / "run", {}, SHAPE, options=["--time", "0:40", "--stop-before-limit", "20"], step_s=0.8
    )
    assert run.wait() == 0
    assert {stop["signal"] for stop in run.events("signal")} == {"SIGUSR2"}
    assert len(run.events("requeue")) >= 1
    assert_undisturbed(run, reference(4))


def test_kill_of_the_supervisor_ends_all_ranks_and_the_run_can_be_resubmitted(reference, tmp_path):
    run = submit(tmp_path / "run", {}, SHAPE, step_s=0.1)
    run.wait_for_step(14)
    os.kill(int(run.status()["job_id"]), signal.SIGKILL)
    assert_no_process_left(run.path)
    assert run.status()["state"] == "FAILED"
    submit(run.path, {}, SHAPE, step_s=0.0)
    assert run.wait() == 0
    assert_undisturbed(run, reference(4))


def test_corrupt_newest_checkpoint_is_reported_and_previous_is_used(reference, tmp_path):
    run = submit(tmp_path / "run", {}, SHAPE, step_s=0.0)
    assert run.wait() == 0
    newest = run.dir.checkpoint(LAST_STEP)
    data = next(newest.glob("__0_*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    submit(run.path, {}, SHAPE, step_s=0.0)
    assert run.wait() == 0
    resumed = run.events("resumed")[-1]
    assert resumed["step"] == LAST_STEP - LAST_STEP % 6
    assert data.name in resumed["broken"][0]
    assert data.name in run.dir.rank_log(max(run.dir.attempts()), 0).read_text()
    assert_undisturbed(run, reference(4))


def test_closing_the_terminal_of_follow_keeps_the_run_alive(tmp_path):
    script = "import time\nfor i in range(40):\n    print(i, flush=True) or time.sleep(0.1)\n"
    (tmp_path / "train.py").write_text(script)
    run = Run(tmp_path / "run", {})
    submit = [sys.executable, "-m", "hpctrain", "submit", "--backend=local", "--run-dir=run"]
    with Terminal([*submit, "--follow", "train.py"], tmp_path, {}) as terminal:
        terminal.expect("3")
    assert run.wait() == 0
    assert run.dir.rank_log(0, 0).read_text().endswith("39\n")
