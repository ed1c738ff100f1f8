"""Submission to a real Slurm: parsing of our scripts, and states of our jobs."""

import re
import sys

import pytest
from helpers.commands import environment, run_command
from helpers.waiting import wait_for

from hpctrain.errors import RunFailed, SchedulerError, SpecError
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.run_log_reader import EventLine, LogText, follow_run
from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.records.run_record import read_run_record
from hpctrain.slurm.sbatch_options import OPTIONS
from hpctrain.slurm.states import RunState


@pytest.fixture
def environ(slurm) -> dict[str, str]:
    return environment(slurm.env)


def test_all_states_of_a_run_are_reported(prepared, environ):
    run, _ = submit_prepared(prepared("sleep", backend="slurm", run_dir="r", environ=environ, time="5"))
    wait_for(lambda: run.status().state is RunState.RUNNING, 20, "the run to start")
    with pytest.raises(SpecError, match="still active"):
        submit_prepared(prepared(backend="slurm", run_dir="r", environ=environ))
    run.cancel()
    with pytest.raises(RunFailed, match="cancelled"):
        run.wait(timeout=120)
    resubmitted, _ = submit_prepared(prepared("vanish", backend="slurm", run_dir="r", environ=environ))
    with pytest.raises(RunFailed, match=r"failed: Slurm reports FAILED\. Log: .*slurm\.log"):
        resubmitted.wait(timeout=120)


def test_table_contains_all_options_of_sbatch(environ):
    printed = run_command(["sbatch", "--help"], environ).stdout
    names = set(re.findall(r"^ +(?:-\w, )?--([a-z-]+)", printed, re.MULTILINE))
    assert len(names) > 80
    assert names - OPTIONS.keys() == set()


def test_unreachable_controller_gives_unknown_state_and_a_note(prepared, environ, tmp_path):
    run, _ = submit_prepared(prepared("sleep", backend="slurm", environ=environ))
    gone = {**environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    try:
        assert Run(run.dir, gone).status().state is RunState.UNKNOWN
        with pytest.raises(SchedulerError):
            prepared(backend="slurm", environ=gone)
        assert "Slurm is not available" in prepared(backend="auto", environ=gone).notes[0]
    finally:
        run.cancel()
    wait_for(lambda: run.status().state.ended, 45, "the run to be gone")


@pytest.mark.extended
def test_requeued_job_starts_soon_and_can_be_followed(environ, tmp_path):
    """With the real supervisor: the first attempt exits at SIGTERM, the second one ends."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('attempt', os.environ['HPCTRAIN_ATTEMPT'], flush=True)\n"
        "time.sleep(60 if os.environ['HPCTRAIN_ATTEMPT'] == '0' else 0)\n"
    )
    submission = prepare_submission(
        script, (), {"nodes": 2, "ntasks_per_node": 2}, environ=environ, cwd=tmp_path, python=sys.executable
    )
    assert submission.spec.backend == "slurm"
    run, _ = submit_prepared(submission)
    logs = [run.dir.rank_log(0, rank) for rank in range(4)]
    wait_for(lambda: all(log.exists() and "attempt 0" in log.read_text() for log in logs), 30, "the ranks")
    run.requeue()
    # Only the run's own events are read until its end: Slurm would delay the second start by 120 s.
    wait_for(lambda: read_run_record(run.dir).finished, 80, "the end of the second attempt")
    *items, last = list(follow_run(run, whole=True))
    assert last.state is RunState.COMPLETED
    lines = [item.line for item in items if isinstance(item, EventLine)]
    assert any("requeueing the job" in line for line in lines)
    text = "".join(item.text for item in items if isinstance(item, LogText))
    first, second = text.splitlines()[:4], text.splitlines()[4:]
    for attempt, output in enumerate((first, second)):
        assert sorted(output) == [f"[{rank}] attempt {attempt}" for rank in range(4)]
    assert run.dir.attempts() == [0, 1]


CALLS = (
    ["squeue"],
    ["scontrol", "requeue", "5"],
    ["scontrol", "show", "config"],
    ["sinfo"],
    ["scancel", "5"],
    ["sbatch", "--wrap", "true"],
)
