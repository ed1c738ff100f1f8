"""Preemption, kills and time limits on a real Slurm: the result is bitwise the undisturbed run's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.training_runs import (
    JOB,
    LAST_STEP,
    Run,
    any_rank,
    assert_undisturbed,
    check_arguments,
    preempt,
    submit,
    train_on_forked_ranks,
)
from helpers.waiting import wait_for

SHAPE = ["--nodes", "4", "--gpus-per-node", "2"]
WORLD_SIZE = 8
#: Each rank takes three seconds of a core to start.
TWO_RANKS = ["--nodes", "2", "--gpus-per-node", "1"]
FOUR_RANKS = ["--nodes", "4", "--gpus-per-node", "1"]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def reference(slurm, tmp_path_factory) -> Run:
    run = submit(tmp_path_factory.mktemp("reference") / "run", slurm.env, SHAPE, step_s=0.0)
    assert run.wait() == 0
    return run


def train_undisturbed(tmp_path_factory, num_ranks: int) -> Run:
    path = tmp_path_factory.mktemp("reference") / "run"
    return train_on_forked_ranks(path, JOB, ["--checkpoint-every", "6"], ranks=num_ranks, nodes=num_ranks)


@pytest.fixture(scope="module")
def four_ranks_reference(tmp_path_factory) -> Run:
    return train_undisturbed(tmp_path_factory, 4)


@pytest.fixture(scope="module")
def preempted(slurm, tmp_path_factory) -> Run:
    return preempt_and_wait(slurm, TWO_RANKS, tmp_path_factory.mktemp("preempted"))


def test_two_ranks_preempted_by_an_urgent_job(preempted, tmp_path_factory):
    check_preempted(preempted, train_undisturbed(tmp_path_factory, 2))


def test_completed_run_requeued_by_slurm_is_not_trained_again(slurm, tmp_path):
    run = submit(tmp_path / "run", slurm.env, ["--nodes", "1", "--gpus-per-node", "1"], step_s=0)
    assert run.wait() == 0
    job_id = run.events("submitted")[0]["job_id"]
    run_command(["scontrol", "requeue", job_id], slurm.env)
    run_command(["scontrol", "update", f"JobId={job_id}", "StartTime=now+2"], slurm.env)
    message = "nothing to do; this job exits"
    wait_for(lambda: message in run.dir.supervisor_log.read_text(), 60, "the next start of the job")
    assert run.dir.attempts() == [0]
    assert run.status()["state"] == "COMPLETED"


def test_job_of_a_completed_run_is_not_requeued_because_of_an_earlier_preemption(slurm, preempted):
    job_id = preempted.events("submitted")[0]["job_id"]
    requeued = run_command(["scontrol", "requeue", job_id], slurm.env, check=False)
    assert "disabled" in requeued.stderr


@pytest.mark.long
def test_preemption_by_an_urgent_job(slurm, reference, tmp_path):
    check_preempted(preempt_and_wait(slurm, SHAPE, tmp_path), reference)


def preempt_and_wait(slurm, shape: list[str], folder: Path) -> Run:
    run = submit(folder / "run", slurm.env, shape, step_s=0.2)
    run.wait_for_step(16)
    preempt(slurm.env)
    assert run.wait() == 0
    return run


def check_preempted(run: Run, reference: Run) -> None:
    assert len(run.events("requeue")) == 1
    stop = run.events("signal")[0]
    assert stop["signal"] == "SIGTERM"
    assert run.events("resumed")[0]["step"] == stop["step"] < LAST_STEP
    parts = {"launch", "interpreter", "worker", "imports", "store", "process group", "set-up", "first step"}
    assert parts <= run.events("startup")[0]["parts"].keys()
    assert_undisturbed(run, reference)
    assert_no_process_left(run.path)


@pytest.mark.long
def test_requeue_leaves_enough_time_to_save(slurm, tmp_path):
    options = ["--env", "HPCTRAIN_STOP_GRACE=SIGTERM=0"]
    run = submit(tmp_path / "run", slurm.env, FOUR_RANKS, options=options, step_s=0.1)
    run.wait_for_step(16)
    run.hpctrain("requeue", str(run.path))
    assert run.wait() == 0
    (stop,) = run.events("signal")
    assert (stop["signal"], stop["saved"]) == ("SIGTERM", True)
    assert run.events("resumed")[0]["step"] == stop["step"] < LAST_STEP
    assert_no_process_left(run.path)


@pytest.mark.long
def test_kill_of_any_rank(slurm, reference, tmp_path):
    run = submit(tmp_path / "run", slurm.env, SHAPE, step_s=0.2)
    run.wait_for_step(20)
    victim = any_rank(WORLD_SIZE)
    run.kill_rank(victim)
    assert run.wait() == 0
    failures = run.events("failure")
    assert [failure["rank"] for failure in failures] == [victim]
    assert "SIGKILL" in failures[0]["cause"]
    assert run.dir.failure(0, victim).exists()
    assert len(run.events("restart")) == 1
    assert run.events("requeue") == []
    assert_undisturbed(run, reference)
    assert_no_process_left(run.path)


@pytest.mark.long
def test_time_limit(slurm, four_ranks_reference, tmp_path):
    # Slurm counts limits in minutes and sends the signal up to a minute early: on a busy machine, the ranks
    # of the first attempt may not train by then.
    options = ["--time", "1", "--stop-before-limit", "25"]
    run = submit(tmp_path / "run", slurm.env, FOUR_RANKS, options=options, step_s=1.2, slow_attempts=2)
    assert run.wait() == 0
    assert {stop["signal"] for stop in run.events("signal")} == {"SIGUSR2"}
    assert len(run.events("requeue")) >= 1
    assert_undisturbed(run, four_ranks_reference)
    assert_no_process_left(run.path)


@pytest.mark.long
def test_cancel_leaves_no_process(slurm, tmp_path):
    run = submit(tmp_path / "run", slurm.env, SHAPE, step_s=0.5)
    run.wait_for_step(2)
    run.hpctrain("cancel", str(run.path))
    run.wait()
    wait_for(lambda: run.status()["state"] == "CANCELLED", 30, "the state CANCELLED")
    assert_no_process_left(run.path, timeout=30)
    assert run.events("requeue") == []
    assert run.events("signal")[0]["saved"] is True


@pytest.mark.long
def test_plain_scancel_does_not_requeue(slurm, tmp_path):
    run = submit(tmp_path / "run", slurm.env, SHAPE, step_s=0.5)
    run.wait_for_step(2)
    run_command(["scancel", run.events("submitted")[0]["job_id"]], slurm.env)
    wait_for(lambda: run.status()["state"] == "CANCELLED", 60, "the state CANCELLED")
    assert_no_process_left(run.path, timeout=30)
    assert run.events("requeue") == []


def test_arguments_arrive_unchanged_and_are_not_executed(slurm, tmp_path):
    check_arguments(["--nodes", "2", "--ntasks-per-node", "1"], slurm.env, tmp_path)


#: Variables that differ between any two jobs, and the distribution of ranks, which hpctrain sets.
DIFFERENT = {"SLURM_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_TASK_PID"}
DIFFERENT |= {"SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT", "SLURM_STEP_RESV_PORTS"}
DIFFERENT |= {"SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "SLURM_JOB_SLUID", "SLURM_DISTRIBUTION"}


def test_ranks_have_the_variables_of_sbatch_and_srun(slurm, tmp_path):
    """Scripts read the shape of the job from variables such as SLURM_JOB_NUM_NODES."""
    script = tmp_path / "variables.py"
    script.write_text(
        "import json, os, sys\n"
        "name = f'{sys.argv[1]}-{os.environ[\"SLURM_PROCID\"]}.json'\n"
        "json.dump({k: v for k, v in os.environ.items() if k.startswith('SLURM')}, open(name, 'w'))\n"
    )
    (node, other), (home, ours) = slurm.nodes[:2], (tmp_path / "plain", tmp_path / "ours")
    shape = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=2", "--mem=200"]
    shape += ["--time=10", "-Jshape", f"--nodelist={node},{other}"]
    command = f"srun --cpus-per-task=2 {sys.executable} {script} {home}"
    run_command(["sbatch", "--wait", "--output=/dev/null", *shape, f"--wrap={command}"], slurm.env)
    run = Run(tmp_path / "run", slurm.env)
    options = [*shape, "--independent-ranks", f"--run-dir={run.path}"]
    run.hpctrain("submit", *options, str(script), str(ours))
    assert run.wait() == 0
    for rank in range(4):
        expected, found = (
            {name: value for name, value in json.loads(path.read_text()).items() if name not in DIFFERENT}
            for path in (tmp_path / f"plain-{rank}.json", tmp_path / f"ours-{rank}.json")
        )
        assert found == expected


@pytest.mark.long
def test_plain_ddp_script_is_requeued_and_finishes(slurm, tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    run = Run(tmp_path / "run", slurm.env)
    run.hpctrain("submit", "--nodes", "2", "--gpus-per-node", "2", "--run-dir", str(run.path), str(script))
    progress = tmp_path / "progress"
    wait_for(lambda: progress.exists() and int(progress.read_text() or 0) >= 3, 60, "three steps")
    run.hpctrain("requeue", str(run.path))
    assert run.wait() == 0
    assert int(progress.read_text()) == 40
    assert len(run.events("requeue")) == 1
    assert_no_process_left(run.path)


PLAIN = """
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
progress = os.path.join(os.path.dirname(__file__), "progress")
first = int(open(progress).read()) if os.path.exists(progress) else 0
for step in range(first, 40):
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 4
    time.sleep(0.2)
    if dist.get_rank() == 0:
        with open(progress + ".new", "w") as file:
            file.write(str(step + 1))
        os.replace(progress + ".new", progress)
dist.barrier()
dist.destroy_process_group()
"""
