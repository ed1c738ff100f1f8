"""The same faults with no Slurm at all: two pretend nodes on this machine."""

from __future__ import annotations

import os
import signal

import pytest
from e2e_runs import LAST_STEP, Run, any_rank, assert_undisturbed, submit
from helpers import assert_no_process_left, wait_for

SHAPE = ["--backend", "local", "--nodes", "2", "--gpus-per-node", "2"]
WORLD_SIZE = 4

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Run:
    run = submit(tmp_path_factory.mktemp("reference") / "run", {}, SHAPE, step_s=0.0)
    assert run.wait() == 0
    return run


def test_undisturbed_run_trains_every_sample_once(reference):
    assert_undisturbed(reference, reference)
    assert reference.events("finished")[0]["state"] == "COMPLETED"
    assert_no_process_left(reference.path)


def test_preempted(reference, tmp_path):
    run = submit(tmp_path / "run", {}, SHAPE, step_s=0.1)
    run.wait_for_step(16)
    run.hpctrain("requeue", str(run.path))
    assert run.wait() == 0
    assert len(run.events("requeue")) == 1
    assert run.events("resumed")[0]["step"] == run.events("signal")[0]["step"] < LAST_STEP
    assert_undisturbed(run, reference)
    assert_no_process_left(run.path)


def test_kill_9_of_any_rank(reference, tmp_path):
    run = submit(tmp_path / "run", {}, SHAPE, step_s=0.1)
    run.wait_for_step(20)
    victim = any_rank(WORLD_SIZE)
    run.kill_rank(victim)
    assert run.wait() == 0
    assert [failure["rank"] for failure in run.events("failure")] == [victim]
    assert_undisturbed(run, reference)
    assert_no_process_left(run.path)


def test_time_limit(reference, tmp_path):
    run = submit(tmp_path / "run", {}, SHAPE, options=["--time", "0:30", "--signal-lead", "15"], step_s=0.4)
    assert run.wait() == 0
    assert {stop["signal"] for stop in run.events("signal")} == {"SIGUSR2"}
    assert len(run.events("requeue")) >= 1
    assert_undisturbed(run, reference)
    assert_no_process_left(run.path)


def test_kill_9_of_the_supervisor_leaves_no_rank_and_the_run_can_be_continued(reference, tmp_path):
    run = submit(tmp_path / "run", {}, SHAPE, step_s=0.1)
    run.wait_for_step(14)
    os.kill(int(run.status()["job_id"]), signal.SIGKILL)
    assert_no_process_left(run.path)
    assert run.status()["state"] == "FAILED"
    submit(run.path, {}, SHAPE, step_s=0.0)
    assert run.wait() == 0
    assert_undisturbed(run, reference)


def test_cancel_saves_and_leaves_no_process_and_the_run_can_be_continued_on_three_ranks(reference, tmp_path):
    run = submit(tmp_path / "run", {}, SHAPE, step_s=0.1)
    run.wait_for_step(14)
    run.hpctrain("cancel", str(run.path))
    wait_for(lambda: run.status()["state"] == "CANCELLED", 60, "the state CANCELLED")
    assert_no_process_left(run.path)
    stopped = run.events("signal")[0]["step"]
    three = ["--backend", "local", "--nodes", "1", "--tasks-per-node", "3"]
    submit(run.path, {}, three, step_s=0.0)
    assert run.wait() == 0
    assert run.events("resumed")[0]["step"] == stopped
    undisturbed = reference.losses()
    assert run.losses() == pytest.approx(undisturbed, rel=0.2)
    assert {step: run.losses()[step] for step in range(1, stopped + 1)} == {
        step: undisturbed[step] for step in range(1, stopped + 1)
    }


def test_corrupted_newest_checkpoint_is_named_and_the_one_before_is_used(reference, tmp_path):
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
    assert_undisturbed(run, reference)
