"""Job arrays on a real Slurm: each task is its own run, and events of one do not affect the others."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.commands import environment, run_command
from helpers.waiting import wait_for

from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.slurm.states import RunState
from hpctrain.sweeps.sweep_record import SweepRecord, read_sweep

#: The first attempt lasts until it is stopped; the second prints its variables.
_SCRIPT = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print(json.dumps({name: value for name, value in os.environ.items() if "ARRAY" in name}), flush=True)
time.sleep(60 if os.environ["HPCTRAIN_ATTEMPT"] == "0" else 0)
"""


@pytest.fixture
def environ(slurm) -> dict[str, str]:
    return environment(slurm.env)


@pytest.fixture
def submit(environ, tmp_path) -> Callable[..., Run]:
    """Submit a waiting script through the real supervisor."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)

    def call(**options: object) -> Run:
        all_options = {"backend": "slurm", "run_dir": "r", **options}
        run, _ = submit_prepared(
            prepare_submission(script, (), all_options, environ=environ, cwd=tmp_path, python=sys.executable)
        )
        return run

    return call


def attempts(run: Run) -> list[int]:
    return [len(task.dir.attempts()) for task in run.tasks()]


@pytest.mark.extended
def test_requeue_and_cancel_affect_one_task_only(submit):
    """The last task of an array has the number of the whole array as its SLURM_JOB_ID."""
    run = submit(array="0-2")
    first, middle, last = run.tasks()
    wait_for(lambda: all(has_started(task) for task in run.tasks()), 40, "all tasks to start")
    last.requeue()
    assert last.wait(timeout=120).attempt == 1
    middle.cancel()
    wait_for(lambda: middle.status().state is RunState.CANCELLED, 20, "the end of the task")
    assert first.status().state is RunState.RUNNING
    assert attempts(run) == [1, 1, 2]
    variables = json.loads(last.dir.rank_log(1, 0).read_text())
    assert variables["HPCTRAIN_ARRAY_TASK_ID"] == "2"
    assert variables["SLURM_ARRAY_JOB_ID"] == run.job_id
    run.cancel()
    wait_for(lambda: run.status().state.ended, 20, "the end of the array")
    resubmitted = submit(array="1")
    assert resubmitted.wait_for_end(timeout=120).tasks == {RunState.CANCELLED: 1, RunState.COMPLETED: 2}


@pytest.mark.extended
def test_sweep_is_extended_while_it_is_pending(prepared, environ):
    """With fake supervisors."""
    small = SweepRecord(args=(), space={"n": "0:2"}, folder="/").with_trials()
    options = {"run_dir": "s", "backend": "slurm", "environ": environ}
    sweep, _ = submit_prepared(
        prepared(array=small.array([0, 1]), sbatch={"hold": ""}, **options), sweep=small
    )
    large = replace(small, space={"n": "0:3"}).with_trials()
    submit_prepared(prepared(array=large.array([2]), **options), sweep=large)
    assert sweep.tasks()[2].wait(timeout=120).state is RunState.COMPLETED
    assert sweep.status().tasks == {"PENDING": 2, "COMPLETED": 1}
    run_command(["scontrol", "release", sweep.tasks()[0].job_id.partition("_")[0]], environ)
    assert sweep.wait(timeout=120).tasks == {"COMPLETED": 3}
    assert [load_spec(task.dir.spec).args for task in sweep.tasks()] == [("--n", str(n)) for n in range(3)]
    assert read_sweep(sweep.dir) == large


def has_started(task: Run) -> bool:
    log = task.log_path()
    return log is not None and log.exists() and "ARRAY" in log.read_text()
