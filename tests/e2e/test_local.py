"""The faults of `test_slurm.py` without Slurm: two emulated nodes on this machine."""

from __future__ import annotations

import os
import signal

import pytest
from helpers.processes import assert_no_process_left
from helpers.training_runs import (
    LAST_STEP,
    Run,
    any_rank,
    assert_every_sample_once,
    assert_undisturbed,
    check_arguments,
    submit,
)
from helpers.waiting import wait_for

SHAPE = ["--backend", "local", "--nodes", "2", "--gpus-per-node", "2"]
WORLD_SIZE = 4

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Run:
    run = submit(tmp_path_factory.mktemp("reference") / "run", {}, SHAPE, step_s=0.0)
    assert run.wait() == 0
    return run


@pytest.mark.long
def test_undisturbed_run_trains_every_sample_once(reference):
    assert_undisturbed(reference, reference)
    assert reference.events("finished")[0]["state"] == "COMPLETED"
    assert_no_process_left(reference.path)


@pytest.mark.long
def test_preemption(reference, tmp_path):
    # A preemption would leave no time to save; a user's requeue has no such limit.
    options = ["--env", "HPCTRAIN_STOP_GRACE=SIGTERM=0"]
    run = submit(tmp_path / "run", {}, SHAPE, options=options, step_s=0.1)
    run.wait_for_step(16)
    run.hpctrain("requeue", str(run.path))
    assert run.wait() == 0
    assert len(run.events("requeue")) == 1
    (stop,) = run.events("signal")
    assert stop["saved"] is True
    assert run.events("resumed")[0]["step"] == stop["step"] < LAST_STEP
    assert_undisturbed(run, reference)
    assert_no_process_left(run.path)


@pytest.mark.long
def test_kill_of_any_rank(reference, tmp_path):
    run = submit(tmp_path / "run", {}, SHAPE, step_s=0.1)
    run.wait_for_step(20)
    victim = any_rank(WORLD_SIZE)
    run.kill_rank(victim)
    assert run.wait() == 0
    assert [failure["rank"] for failure in run.events("failure")] == [victim]
    assert_undisturbed(run, reference)
    assert_no_process_left(run.path)


@pytest.mark.long
def test_time_limit(reference, tmp_path):
    run = submit(
        tmp_path / "run", {}, SHAPE, options=["--time", "0:40", "--stop-before-limit", "20"], step_s=0.8
    )
    assert run.wait() == 0
    assert {stop["signal"] for stop in run.events("signal")} == {"SIGUSR2"}
    assert len(run.events("requeue")) >= 1
    assert_undisturbed(run, reference)
    assert_no_process_left(run.path)


@pytest.mark.long
def test_kill_of_the_supervisor_ends_all_ranks_and_the_run_can_be_resubmitted(reference, tmp_path):
    run = submit(tmp_path / "run", {}, SHAPE, step_s=0.1)
    run.wait_for_step(14)
    os.kill(int(run.status()["job_id"]), signal.SIGKILL)
    assert_no_process_left(run.path)
    assert run.status()["state"] == "FAILED"
    submit(run.path, {}, SHAPE, step_s=0.0)
    assert run.wait() == 0
    assert_undisturbed(run, reference)


@pytest.mark.long
def test_cancelled_run_saves_and_resumes_on_three_ranks(tmp_path):
    """Without dropout, which depends on the number of ranks."""
    no_dropout = ("--dropout", "0")
    run = submit(tmp_path / "run", {}, SHAPE, step_s=0.1, further=no_dropout)
    run.wait_for_step(14)
    run.hpctrain("cancel", str(run.path))
    wait_for(lambda: run.status()["state"] == "CANCELLED", 60, "the state CANCELLED")
    assert_no_process_left(run.path)
    stopped = run.events("signal")[0]["step"]
    three = ["--backend", "local", "--nodes", "1", "--ntasks-per-node", "3"]
    submit(run.path, {}, three, step_s=0.0, further=no_dropout)
    assert run.wait() == 0
    assert run.events("resumed")[0]["step"] == stopped
    single_rank = submit(tmp_path / "one", {}, ["--backend", "local"], step_s=0.0, further=no_dropout)
    assert single_rank.wait() == 0
    assert run.losses() == pytest.approx(single_rank.losses(), rel=1e-5)
    assert_every_sample_once(run)


@pytest.mark.extended
def test_arguments_arrive_unchanged_and_are_not_executed(tmp_path):
    check_arguments(["--backend", "local", "--nodes", "2", "--ntasks-per-node", "1"], {}, tmp_path)


@pytest.mark.long
def test_variables_of_an_outer_torchrun_are_ignored(tmp_path):
    env = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "HPCTRAIN_ENVIRONMENT": "local"}
    run = submit(tmp_path / "run", env, ["--backend", "local", "--ntasks-per-node", "2"], step_s=0.0)
    assert run.wait() == 0
    assert sorted(path.name for path in run.dir.attempt_logs(0).glob("rank-*")) == [
        "rank-00000.log",
        "rank-00001.log",
    ]
    assert len(list((run.path / "samples").iterdir())) == 2


@pytest.mark.long
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
    assert_undisturbed(run, reference)
