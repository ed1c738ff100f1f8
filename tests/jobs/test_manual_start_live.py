"""A job's script, started with the command in its first lines."""

from __future__ import annotations

import re
import sys
import time

import pytest
from helpers.commands import environment, run_command
from helpers.waiting import wait_for

from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.jobs.submit.submit import submit_prepared
from hpctrain.records.run_record import read_run_record
from hpctrain.slurm.states import RunState

_MANUALLY = re.compile(r"^# To submit manually:  (?P<command>.*?)   \(script", re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["local", pytest.param("slurm", marks=pytest.mark.slurm)])
@pytest.mark.parametrize("extra_options", [{"ntasks_per_node": 2}, {"array": "0-1%2"}], ids=["run", "array"])
def test_script_started_manually_runs_the_next_attempt(backend, extra_options, tmp_path, request):
    """The supervisor waits ten seconds for `hpctrain submit` to record the job, then records it."""
    environ = environment(request.getfixturevalue("slurm").env if backend == "slurm" else None)
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint('attempt', os.environ['HPCTRAIN_ATTEMPT'], sys.argv[1:])\n")
    all_options = {"backend": backend, "run_dir": "a run's", **extra_options}
    args = ("--name", "a b", "$(false)")
    run = submit_prepared(
        prepare_submission(script, args, all_options, environ=environ, cwd=tmp_path, python=sys.executable)
    )
    run.wait(timeout=120)
    assert "Written by `hpctrain submit` " in run.dir.job_script.read_text()
    command = _MANUALLY.search(run.dir.job_script.read_text())
    assert command is not None
    run_command(["bash", "-c", command["command"]], environ, cwd=run.dir.path, timeout=60)
    for each in run.tasks() or [run]:
        log = each.dir.rank_log(1, 0)
        wait_for(lambda log=log: log.exists() and log.read_text(), 60, "the second start")
        assert log.read_text() == f"attempt 1 {list(args)}\n"
    assert run.wait(timeout=120).state is RunState.COMPLETED


@pytest.mark.long
@pytest.mark.parametrize("backend", ["local", pytest.param("slurm", marks=pytest.mark.slurm)])
def test_script_started_manually_during_its_run_is_refused(backend, tmp_path, request):
    """Two jobs in one folder would overwrite each other's checkpoints and events."""
    environ = environment(request.getfixturevalue("slurm").env if backend == "slurm" else None)
    script, flag = tmp_path / "train.py", tmp_path / "flag"
    script.write_text(
        "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists():\n time.sleep(0.1)\n"
    )
    options = {"backend": backend, "run_dir": "run"}
    run = submit_prepared(
        prepare_submission(script, [str(flag)], options, environ=environ, cwd=tmp_path, python=sys.executable)
    )
    try:
        wait_for(lambda: read_run_record(run.dir).started, 60, "the first attempt")
        before = list(run.dir.read_events())
        if backend == "local":
            refused = run_command(["bash", run.dir.job_script], environ, check=False, timeout=60)
            assert (refused.returncode, "is still" in refused.stderr) == (2, True)
        else:
            outside = run_command(["bash", run.dir.job_script], environ, check=False, timeout=60)
            assert (outside.returncode, f"as job {run.job_id}. " in outside.stderr) == (2, True)
            second = run_command(
                ["srun", "--overlap", f"--jobid={run.job_id}", "bash", run.dir.job_script],
                environ,
                check=False,
            )
            assert (second.returncode, "holds the lease" in second.stderr) == (2, True)
            job_id = run_command(["sbatch", "--parsable", run.dir.job_script], environ).stdout.strip()
            query = ["scontrol", "show", "job", job_id]
            wait_for(lambda: "ExitCode=2:0" in run_command(query, environ).stdout, 60, "its end")
            assert "is still" in run.dir.slurm_log.read_text()
        assert list(run.dir.read_events()) == before
        assert run.status().state is RunState.RUNNING
    finally:
        flag.touch()
    assert run.wait(timeout=120).attempt == 0


@pytest.mark.long
def test_pending_manual_job_is_cancelled_with_the_run(tmp_path, slurm):
    """It was submitted before the cancel. A job submitted afterwards continues the run."""
    environ = environment(slurm.env)
    script = tmp_path / "train.py"
    script.write_text("import os, time\ntime.sleep(0 if os.environ['HPCTRAIN_ATTEMPT'] == '1' else 60)\n")
    options = {"backend": "slurm", "run_dir": "run"}
    run = submit_prepared(
        prepare_submission(script, [], options, environ=environ, cwd=tmp_path, python=sys.executable)
    )
    wait_for(lambda: run.status().attempt == 0, 60, "the first attempt")
    sbatch = ["sbatch", "--parsable", f"--dependency=afterany:{run.job_id}", run.dir.job_script]
    waiting = run_command(sbatch, environ).stdout.strip()
    time.sleep(1.1)  # Slurm reports submission times in whole seconds.
    run.cancel()
    assert run.wait_for_end(timeout=120).state is RunState.CANCELLED
    before = list(run.dir.read_events())
    query = ["scontrol", "show", "job", waiting]
    ended = re.compile("JobState=(FAILED|COMPLETED|CANCELLED|TIMEOUT)")
    wait_for(lambda: ended.search(run_command(query, environ).stdout), 60, "its end")
    assert "ExitCode=2:0" in run_command(query, environ).stdout
    assert f"was cancelled after job {waiting} was submitted" in run.dir.slurm_log.read_text()
    assert list(run.dir.read_events()) == before
    resubmitted = run_command(["sbatch", "--parsable", run.dir.job_script], environ).stdout.strip()
    wait_for(lambda: run.job_id == resubmitted, 60, "the record of the second start")
    assert run.wait(timeout=120).attempt == 1
