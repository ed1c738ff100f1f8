"""A job's script, started again with the command in its first lines."""

from __future__ import annotations

import sys

import pytest
from helpers.commands import environment, run_command
from helpers.waiting import wait_for

from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.jobs.submit.submit import submit_prepared
from hpctrain.slurm.states import RunState

#: The first attempt waits for a file.
_SCRIPT = """
import os, pathlib, sys, time
while os.environ["HPCTRAIN_ATTEMPT"] == "0" and not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""


@pytest.mark.long
@pytest.mark.parametrize("backend", ["local", pytest.param("slurm", marks=pytest.mark.slurm)])
@pytest.mark.parametrize("shape", [{"ntasks_per_node": 2}, {"array": "0-1%2"}], ids=["run", "array"])
def test_script_starts_an_ended_run_again_and_no_active_one(backend, shape, tmp_path, request):
    environ = environment(request.getfixturevalue("slurm").env if backend == "slurm" else None)
    script, flag = tmp_path / "train.py", tmp_path / "flag"
    script.write_text(_SCRIPT)
    options = {"backend": backend, "run_dir": "a run's", **shape}
    run = submit_prepared(
        prepare_submission(script, [str(flag)], options, environ=environ, cwd=tmp_path, python=sys.executable)
    )
    start = ["sbatch", "--wait"] if backend == "slurm" else ["bash"]
    assert f"To start an ended run again: {start[0]} job.sbatch" in run.dir.job_script.read_text()
    start = [*start, "job.sbatch"]
    try:
        single = (run.tasks() or [run])[0]
        wait_for(lambda: single.status().attempt == 0, 60, "the first attempt")
        if not run.tasks():
            assert run_command(start, environ, cwd=run.dir.path, check=False, timeout=60).returncode == 2
            assert run.status().state is RunState.RUNNING
    finally:
        flag.touch()
    run.wait(timeout=120)
    run_command(start, environ, cwd=run.dir.path, timeout=100)
    assert [task.status().attempt for task in run.tasks() or [run]] == [1] * max(1, len(run.tasks()))
    assert run.wait(timeout=120).state is RunState.COMPLETED
