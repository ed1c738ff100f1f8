"""Job arrays with the local backend and fake supervisors of their tasks."""

import os
import signal
from itertools import accumulate
from pathlib import Path

import pytest
from helpers.processes import assert_no_process_left
from helpers.waiting import wait_for

from hpctrain.errors import RunFailed, SpecError
from hpctrain.files import read_json_lines
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import RunState
from hpctrain.supervisor.local_array import LocalArray
from hpctrain.telemetry.sampling import nvml

pytestmark = pytest.mark.ranks


def states(run: Run) -> list[str]:
    return [str(task.status().state) for task in run.tasks()]


def max_concurrent(run: Run) -> int:
    """Return the maximum number of concurrent tasks, from their events."""
    changes = {"started": 1, "finished": -1}
    transitions = sorted(
        (event["time"], changes[event["kind"]])
        for task in run.tasks()
        for event in read_json_lines(task.dir.events)
        if event["kind"] in changes
    )
    return max(accumulate(change for _, change in transitions))


@pytest.mark.parametrize(
    ("array", "at_once"), [pytest.param("0-3", 1, marks=pytest.mark.extended), ("0-5%3", 3)]
)
def test_tasks_run_in_their_own_folders_within_the_throttle(prepared, array, at_once):
    submission = prepared("meet", str(at_once), array=array, run_dir="r")
    run, _ = submit_prepared(submission)
    assert run.wait(timeout=120).state is RunState.COMPLETED
    assert max_concurrent(run) == at_once
    assert run.dir.tasks() == list(range(len(run.tasks())))
    for index, task in enumerate(run.tasks()):
        spec = load_spec(task.dir.spec)
        assert (spec.array, spec.array_task, spec.run_dir) == (None, index, str(task.dir.path))
        assert (task.job_id, task.status().attempt) == (f"{run.job_id}_{index}", 0)
    assert_no_process_left(run.dir.path)


def test_throttle_beyond_the_machines_gpus_is_refused(prepared, monkeypatch):
    monkeypatch.setattr(nvml, "count_gpus", lambda environ: 3)
    prepared(array="0-3%3", gpus_per_node=1)
    with pytest.raises(SpecError, match=r"1 × 1 × 4 = 4 GPUs .*--array.* has 3"):
        prepared(array="0-3%4", gpus_per_node=1)
    with pytest.raises(SpecError, match=r"requests 9000 ranks .*--array"):
        prepared(array="0-9999%9000")


def test_concurrent_tasks_have_distinct_gpus(make_spec, monkeypatch):
    monkeypatch.setattr("hpctrain.supervisor.launch.step_launchers.count_gpus", lambda environ: 4)
    spec = make_spec(backend="local", array="0-3%2", nodes=2, gpus_per_node=1)
    array = LocalArray(RunDir(Path(spec.run_dir)), spec, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert [array._gpus_of(slot) for slot in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]


def test_pending_or_running_task_is_cancelled_alone(prepared):
    run, _ = submit_prepared(prepared("sleep", array="0-3%2", run_dir="r"))
    wait_for(lambda: states(run).count("RUNNING") == 2, 20, "two tasks to run")
    first, *_, last = run.tasks()
    assert states(run) == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
    last.cancel()
    assert states(run) == ["RUNNING", "RUNNING", "PENDING", "CANCELLED"]
    first.cancel()
    wait_for(lambda: states(run) == ["CANCELLED", "RUNNING", "RUNNING", "CANCELLED"], 20, "the third to run")
    run.cancel()
    with pytest.raises(RunFailed, match="cancelled"):
        run.wait(timeout=120)
    assert states(run) == ["CANCELLED"] * 4
    assert not last.dir.attempts()
    assert_no_process_left(run.dir.path)


def test_end_of_the_array_supervisor_ends_its_tasks(prepared):
    run, _ = submit_prepared(prepared("sleep", array="0-2%2", run_dir="r"))
    wait_for(lambda: states(run).count("RUNNING") == 2, 20, "two tasks to run")
    os.kill(int(run.dir.lock.read_text()), signal.SIGTERM)
    assert run.wait_for_end(timeout=120).state is RunState.CANCELLED
    assert_no_process_left(run.dir.path)


def test_vanished_task_fails_while_the_others_continue_and_is_resubmitted_alone(prepared):
    run, _ = submit_prepared(prepared("vanish-1", array="0-2", run_dir="r"))
    with pytest.raises(
        RunFailed, match="task-1: the supervisor of this task exited with code 9 without reporting a cause"
    ):
        run.wait(timeout=120)
    assert states(run) == ["COMPLETED", "FAILED", "COMPLETED"]
    resubmitted, _ = submit_prepared(prepared(array="1,3", run_dir="r"))
    assert resubmitted.wait(timeout=120).state is RunState.COMPLETED
    assert [task.status().attempt for task in resubmitted.tasks()] == [0, 1, 0, 0]
    first_id = next(read_json_lines(run.dir.events))["job_id"]
    jobs = [f"{first_id}_0", f"{resubmitted.job_id}_1", f"{first_id}_2", f"{resubmitted.job_id}_3"]
    assert [task.job_id for task in resubmitted.tasks()] == jobs


def test_pending_tasks_fail_when_the_array_supervisor_is_killed(prepared):
    run, _ = submit_prepared(prepared("sleep", array="0-1", run_dir="r"))
    # Its lock is held before it has its own supervisor.
    wait_for(run.tasks()[0].dir.rank_log(0, 0).exists, 20, "a task to run")
    assert states(run) == ["RUNNING", "PENDING"]
    os.kill(int(run.dir.lock.read_text()), signal.SIGKILL)
    wait_for(lambda: states(run) == ["RUNNING", "FAILED"], 20, "the other to be given up")
    # Its supervisor is alive, so no other may start in that folder.
    with pytest.raises(SpecError, match="still active"):
        submit_prepared(prepared(array="0-1", run_dir="r"))
    run.tasks()[0].cancel()
    wait_for(lambda: states(run) == ["CANCELLED", "FAILED"], 20, "the end")
    assert_no_process_left(run.dir.path)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {"array": "0-1"}, "is a single run and cannot continue as a job array"),
        ({"array": "0-1"}, {}, "contains a job array. Use --array to select the tasks to resume"),
        ({"array": "0-1"}, {"run_dir": "r/task-1"}, r"a task of a job array. .* --run-dir \S+/r --array 1\."),
    ],
)
def test_array_and_single_run_cannot_continue_as_each_other(prepared, first, second, message):
    run, _ = submit_prepared(prepared(run_dir="r", **first))
    run.wait(timeout=120)
    with pytest.raises(SpecError, match=message):
        prepared(**{"run_dir": "r", **second})
