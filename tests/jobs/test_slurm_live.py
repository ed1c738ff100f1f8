"""Submission to a real Slurm: parsing of our scripts, and states of our jobs."""

import re

import pytest
from helpers.commands import run_command
from helpers.waiting import wait_for

from hpctrain.errors import RunFailed, SchedulerError, SpecError
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.slurm.sbatch_options import OPTIONS
from hpctrain.slurm.states import RunState


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
