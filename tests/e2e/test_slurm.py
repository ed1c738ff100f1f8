"""Preemption, kills and time limits on a real Slurm: the result is bitwise the undisturbed run's."""

import json
import re
import sys

import pytest
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.training_runs import LAST_STEP, Run, any_rank, assert_undisturbed, preempt, submit, submit_script
from helpers.waiting import wait_for

#: Each rank takes three seconds of a core to start.
TWO_RANKS = ["--nodes", "2", "--gpus-per-node", "1"]
FOUR_RANKS = ["--nodes", "4", "--gpus-per-node", "1"]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def preempted(slurm, tmp_path_factory) -> Run:
    run = submit(tmp_path_factory.mktemp("preempted") / "run", slurm.env, TWO_RANKS, step_s=0.2)
    run.wait_for_step(16)
    preempt(slurm.env)
    assert run.wait() == 0
    return run


def test_two_ranks_preempted_by_an_urgent_job(preempted, reference):
    assert len(preempted.events("requeue")) == 1
    stop = preempted.events("signal")[0]
    assert stop["signal"] == "SIGTERM"
    assert preempted.events("resumed")[0]["step"] == stop["step"] < LAST_STEP
    parts = {"launch", "interpreter", "worker", "imports", "store", "process group", "set-up", "first step"}
    assert parts <= preempted.events("startup")[0]["parts"].keys()
    assert_undisturbed(preempted, reference(2))
    report = json.loads(preempted.hpctrain("report", str(preempted.path), "--json").stdout)
    assert [attempt["end"] for attempt in report["attempts"]] == ["stop", "completed"]
    assert sum(row["us"] or 0 for row in report["ledger"]) == report["wall_us"]


#: A batch script that requeues its job once.
REQUEUES_ITSELF = """#!/bin/bash
#SBATCH --ntasks=1
srun sleep 1
[ -n "$SLURM_RESTART_COUNT" ] || { scontrol requeue "$SLURM_JOB_ID"; sleep 100; }
"""


@pytest.mark.extended
@pytest.mark.parametrize("program", ["script", "batch script"])
def test_requeue_with_scontrol_is_counted_and_explained(slurm, tmp_path, program):
    run = Run(tmp_path / "run", slurm.env)
    if program == "script":
        run = submit(run.path, slurm.env, ["--nodes", "1", "--gpus-per-node", "1"], step_s=0.2)
        run.wait_for_step(8)
        run_command(["scontrol", "requeue", run.events("submitted")[0]["job_id"]], slurm.env)
    else:
        (tmp_path / "job.sbatch").write_text(REQUEUES_ITSELF)
        run.hpctrain("submit", "--run-dir", str(run.path), "job.sbatch", cwd=tmp_path)
    assert run.wait() == 0
    cause = "requeued with `scontrol requeue`, not `hpctrain requeue`"
    (requeue,) = run.events("requeue")
    first, second = run.events("started")
    assert (requeue["by"], requeue["cause"]) == ("slurm", cause)
    assert first["time"] < requeue["time"] < second["time"]
    status = run.hpctrain("status", str(run.path)).stdout
    assert re.search(rf"^restarts +1, the last at .*: {cause}$", status, re.MULTILINE)
    report = json.loads(run.hpctrain("report", str(run.path), "--json").stdout)
    interrupted, completed = report["attempts"]
    assert (interrupted["end"], interrupted["followed_by"]) == ("stop", "requeue")
    assert interrupted["cause"].startswith(cause)
    assert completed["end"] == "completed"
    spent_us = {row["what"]: row["us"] for row in report["ledger"]}
    assert spent_us["queued"] > 1e6 * (second["time"] - requeue["time"]) - 1
    assert "1 stop" in run.hpctrain("report", str(run.path), "-o", "-").stdout


@pytest.mark.extended
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


@pytest.mark.extended
def test_options_that_delay_the_start_do_not_delay_a_requeued_job(slurm, tmp_path):
    starts = ["--hold", "--begin=now+1", "--dependency=singleton", "--sbatch=deadline=now+1day", "--time=30"]
    run = submit(tmp_path / "run", slurm.env, TWO_RANKS, options=starts, step_s=0.2)
    assert run.status()["state"] == "PENDING"
    job_id = run.events("submitted")[0]["job_id"]
    run_command(["scontrol", "release", job_id], slurm.env)
    run.wait_for_step(4)
    run.hpctrain("requeue", str(run.path))
    assert run.wait() == 0
    assert (len(run.events("submitted")), len(run.events("requeue"))) == (1, 1)
    assert sorted(run.losses()) == list(range(1, LAST_STEP + 1))


@pytest.mark.long
def test_kill_of_any_rank(slurm, reference, tmp_path):
    run = submit(tmp_path / "run", slurm.env, FOUR_RANKS, step_s=0.2)
    run.wait_for_step(20)
    victim = any_rank(4)
    run.kill_rank(victim)
    assert run.wait() == 0
    failures = run.events("failure")
    assert [failure["rank"] for failure in failures] == [victim]
    assert "SIGKILL" in failures[0]["cause"]
    assert run.dir.failure(0, victim).exists()
    assert len(run.events("restart")) == 1
    assert run.events("requeue") == []
    assert_undisturbed(run, reference(4))


@pytest.mark.long
def test_time_limit(slurm, reference, tmp_path):
    # Slurm counts limits in minutes and sends the signal up to a minute early: on a busy machine, the ranks
    # of the first attempt may not train by then.
    options = ["--time", "1", "--stop-before-limit", "25"]
    run = submit(tmp_path / "run", slurm.env, FOUR_RANKS, options=options, step_s=1.2, slow_attempts=2)
    assert run.wait() == 0
    assert {stop["signal"] for stop in run.events("signal")} == {"SIGUSR2"}
    assert {event["class"] for event in run.events("requeue")} == {"time-limit"}
    assert_undisturbed(run, reference(4))


@pytest.mark.long
@pytest.mark.parametrize("command", ["cancel", "scancel"])
def test_cancel_leaves_no_process(slurm, tmp_path, command):
    run = submit(tmp_path / "run", slurm.env, FOUR_RANKS, step_s=0.5)
    run.wait_for_step(2)
    if command == "cancel":
        run.hpctrain("cancel", str(run.path))
    else:
        run_command(["scancel", run.events("submitted")[0]["job_id"]], slurm.env)
    run.wait_for_state("CANCELLED")
    assert_no_process_left(run.path, timeout=30)
    assert run.events("requeue") == []
    assert command == "scancel" or run.events("signal")[0]["saved"] is True


HOSTILE_ARGUMENTS = [
    *(":", "--", "--nodes=3", "-J", "", " ", "two  words", "'", '"', "\\", "%j %%", "é ü 漢 🏖", "{{ x }}"),
    *("$(touch executed)", "`touch executed`", "; touch executed", "&& touch executed"),
    *("a\nb", "\n#SBATCH --job-name=executed\n"),
]

DUMP = """
import json, os, sys
from pathlib import Path
record = [sys.argv[1:], {name: value for name, value in os.environ.items() if name.startswith("WORD_")}]
Path(os.environ["HPCTRAIN_RUN_DIR"], f"dump-{os.environ['RANK']}.json").write_text(json.dumps(record))
"""


def test_arguments_arrive_unchanged_and_are_not_executed(slurm, tmp_path):
    folder = tmp_path / "a 'b' \"c\" $(touch executed) ; #SBATCH %j"
    folder.mkdir()
    script = folder / "train '$(touch executed)';\n.py"
    script.write_text(DUMP)
    variables = {f"WORD_{i}": argument for i, argument in enumerate(HOSTILE_ARGUMENTS)}
    options = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    options += ["--nodes=2", "--ntasks-per-node=1"]
    run = submit_script(folder, script, *HOSTILE_ARGUMENTS, options=options, env=slurm.env)
    assert run.wait() == 0
    for rank in range(2):
        assert json.loads((run.path / f"dump-{rank}.json").read_text()) == [HOSTILE_ARGUMENTS, variables]
    assert list(tmp_path.rglob("executed*")) == []


#: Variables that differ between any two jobs, and the distribution of ranks (docs/environments.md).
DIFFERENT = {"SLURM_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_TASK_PID"}
DIFFERENT |= {"SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT", "SLURM_STEP_RESV_PORTS"}
DIFFERENT |= {"SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "SLURM_JOB_SLUID", "SLURM_DISTRIBUTION"}


def test_ranks_have_the_variables_of_sbatch_and_srun(slurm, tmp_path):
    """Scripts read the shape of the job from variables such as SLURM_JOB_NUM_NODES."""
    script = tmp_path / "variables.py"
    script.write_text(
        "import json, os, sys\n"
        "name = f'{sys.argv[1]}-{os.environ[\"SLURM_PROCID\"]}.json'\n"
        "names = 'CUDA_VISIBLE_DEVICES', 'GPU_DEVICE_ORDINAL', 'PATH', 'TMPDIR'\n"
        "kept = {k: v for k, v in os.environ.items() if k.startswith('SLURM') or k in names}\n"
        "json.dump(kept, open(name, 'w'))\n"
    )
    environ = slurm.env | {"TMPDIR": str(tmp_path)}
    (node, other), (home, ours) = slurm.nodes[:2], (tmp_path / "plain", tmp_path / "ours")
    shape = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=2", "--mem=200"]
    shape += ["--time=10", "-Jshape", f"--nodelist={node},{other}"]
    command = f"srun --cpus-per-task=2 {sys.executable} {script} {home}"
    run_command(["sbatch", "--wait", "--output=/dev/null", *shape, f"--wrap={command}"], environ)
    run = Run(tmp_path / "run", environ)
    options = [*shape, "--independent-ranks", f"--run-dir={run.path}"]
    run.hpctrain("submit", *options, str(script), str(ours))
    assert run.wait() == 0
    for rank in range(4):
        expected, found = (
            {name: value for name, value in json.loads(path.read_text()).items() if name not in DIFFERENT}
            for path in (tmp_path / f"plain-{rank}.json", tmp_path / f"ours-{rank}.json")
        )
        assert found == expected
