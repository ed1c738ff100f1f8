"""Job arrays on this machine, with supervisors of the tasks that only pretend."""

from __future__ import annotations

import os
import signal
from itertools import accumulate
from pathlib import Path

import pytest
from helpers.commands import environment
from helpers.processes import assert_no_process_left, run_processes
from helpers.waiting import wait_for

from hpctrain.errors import RunFailed, SchedulerError, SpecError
from hpctrain.jobs.runs.follow import follow_run
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.run_log_reader import LogText
from hpctrain.jobs.submit.submit import submit_prepared
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import RunState
from hpctrain.spec.load_spec import load_spec
from hpctrain.supervisor import main as supervisor_main
from hpctrain.supervisor.local_array import LocalArray
from hpctrain.telemetry.sampling import nvml

pytestmark = pytest.mark.ranks


def states(run: Run) -> list[str]:
    return [str(task.status().state) for task in run.tasks()]


def most_at_once(run: Run) -> int:
    """How many of the tasks were going at the same moment, by their own record."""
    changes = {"started": 1, "finished": -1}
    turns = sorted(
        (event["time"], changes[event["kind"]])
        for task in run.tasks()
        for event in task.dir.read_events()
        if event["kind"] in changes
    )
    return max(accumulate(change for _, change in turns))


@pytest.mark.parametrize(("array", "at_once"), [("0-3", 1), ("0-5%3", 3)])
def test_tasks_run_in_their_own_folders_and_no_more_at_once_than_allowed(prepared, array, at_once):
    submission = prepared("nap", array=array, run_dir="r")
    run = submit_prepared(submission)
    assert run.wait(timeout=30).state is RunState.COMPLETED
    assert most_at_once(run) == at_once
    assert run.dir.tasks() == list(range(len(run.tasks())))
    for index, task in enumerate(run.tasks()):
        spec = load_spec(task.dir.spec)
        assert (spec.array, spec.array_task, spec.run_dir) == (None, index, str(task.dir.path))
        assert (task.job_id, task.status().attempt) == (f"{run.job_id}_{index}", 0)
    assert_no_process_left(run.dir.path)


def test_how_tasks_run_here_is_said(prepared):
    assert "one after another" in prepared(array="0-3").notes[0]
    assert "3 at once" in prepared(array="0-9%3").notes[0]


def test_more_at_once_than_this_machine_has(prepared, monkeypatch):
    monkeypatch.setattr(nvml, "count_gpus", lambda environ: 3)
    prepared(array="0-3%3", gpus_per_node=1)
    with pytest.raises(SpecError, match=r"1 × 1 × 4 = 4 GPUs .*--array.* has 3"):
        prepared(array="0-3%4", gpus_per_node=1)
    with pytest.raises(SpecError, match=r"9000 ranks requested .*--array"):
        prepared(array="0-9999%9000")


def test_tasks_that_run_at_once_have_gpus_of_their_own(make_spec, monkeypatch):
    monkeypatch.setattr("hpctrain.supervisor.launch.local.count_gpus", lambda environ: 4)
    spec = make_spec(backend="local", array="0-3%2", nodes=2, gpus_per_node=1)
    array = LocalArray(RunDir(Path(spec.run_dir)), spec, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert [array._gpus_of(place) for place in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]


def test_a_task_is_cancelled_alone_whether_it_waits_or_runs(prepared):
    run = submit_prepared(prepared("sleep", array="0-3%2", run_dir="r"))
    wait_for(lambda: states(run).count("RUNNING") == 2, 20, "two tasks to run")
    first, *_, last = run.tasks()
    assert states(run) == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
    last.cancel()
    assert states(run) == ["RUNNING", "RUNNING", "PENDING", "CANCELLED"]
    first.cancel()
    wait_for(lambda: states(run) == ["CANCELLED", "RUNNING", "RUNNING", "CANCELLED"], 20, "the third to run")
    run.cancel()
    with pytest.raises(RunFailed, match="cancelled"):
        run.wait(timeout=20)
    assert states(run) == ["CANCELLED"] * 4
    assert not last.dir.attempts()
    assert_no_process_left(run.dir.path)


def test_the_end_of_the_array_itself_ends_its_tasks(prepared):
    run = submit_prepared(prepared("sleep", array="0-2%2", run_dir="r"))
    wait_for(lambda: states(run).count("RUNNING") == 2, 20, "two tasks to run")
    os.kill(int(run.dir.lock.read_text()), signal.SIGTERM)
    assert run.wait_for_end(timeout=20).state is RunState.CANCELLED
    assert_no_process_left(run.dir.path)


def test_a_task_that_vanishes_fails_and_the_others_go_on(prepared):
    run = submit_prepared(prepared("vanish-1", array="0-2", run_dir="r"))
    with pytest.raises(RunFailed, match="task-1: its supervisor exited with 9 without reporting a cause"):
        run.wait(timeout=20)
    assert states(run) == ["COMPLETED", "FAILED", "COMPLETED"]


def test_tasks_whose_turn_never_comes_have_failed(prepared):
    run = submit_prepared(prepared("sleep", array="0-1", run_dir="r"))
    # Its lock is held already before it has a supervisor of its own.
    wait_for(run.tasks()[0].dir.rank_log(0, 0).exists, 20, "a task to run")
    assert states(run) == ["RUNNING", "PENDING"]
    os.kill(int(run.dir.lock.read_text()), signal.SIGKILL)
    wait_for(lambda: states(run) == ["RUNNING", "FAILED"], 20, "the other to be given up")
    # Its supervisor is alive, so nobody else may start in that folder.
    with pytest.raises(SpecError, match="still active"):
        submit_prepared(prepared(array="0-1", run_dir="r"))
    run.tasks()[0].cancel()
    wait_for(lambda: states(run) == ["CANCELLED", "FAILED"], 20, "the end")
    assert_no_process_left(run.dir.path)


def test_some_tasks_of_an_array_are_continued(prepared):
    run = submit_prepared(prepared("vanish-1", array="0-2", run_dir="r"))
    run.wait_for_end(timeout=20)
    again = submit_prepared(prepared(array="1,3", run_dir="r"))
    assert again.wait(timeout=20).state is RunState.COMPLETED
    assert [task.status().attempt for task in again.tasks()] == [0, 1, 0, 0]
    old = next(run.dir.read_events())["job_id"]
    jobs = [f"{old}_0", f"{again.job_id}_1", f"{old}_2", f"{again.job_id}_3"]
    assert [task.job_id for task in again.tasks()] == jobs


def test_an_array_that_is_going_refuses_another(prepared):
    run = submit_prepared(prepared("sleep", array="0-1", run_dir="r"))
    wait_for(lambda: states(run)[0] == "RUNNING", 20, "a task to run")
    with pytest.raises(SpecError, match="still active"):
        submit_prepared(prepared(array="5", run_dir="r"))
    assert run.dir.tasks() == [0, 1]
    run.cancel()
    run.wait_for_end(timeout=20)


def test_the_script_of_an_array_can_be_started_by_hand(prepared, monkeypatch):
    run = submit_prepared(prepared(array="0-1", run_dir="r"))
    run.wait(timeout=20)
    # Nobody is about to record this submission, so nothing is waited for; and it stays in this process.
    monkeypatch.setattr("hpctrain.supervisor.acquire_run._RECORD_LIMIT_S", 0.0)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        assert supervisor_main.main([str(run.dir.path)], environment()) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert [task.status().attempt for task in run.tasks()] == [1, 1]
    assert run.tasks()[1].job_id == f"{os.getpid()}_1"


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ({}, {"array": "0-1"}, "is a single run and cannot continue as a job array"),
        ({"array": "0-1"}, {}, "contains a job array. Name the tasks to resume"),
        ({"array": "0-1"}, {"run_dir": "r/task-1"}, r"a task of a job array. .* --run-dir \S+/r --array 1\."),
    ],
)
def test_a_run_goes_on_as_what_it_was(prepared, first, then, words):
    submit_prepared(prepared(run_dir="r", **first)).wait(timeout=20)
    with pytest.raises(SpecError, match=words):
        prepared(**{"run_dir": "r", **then})


def test_a_submission_that_fails_takes_away_only_what_it_made(prepared, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr("hpctrain.jobs.backends.local.subprocess.Popen", refuse)
        with pytest.raises(SchedulerError, match="no more processes"):
            submit_prepared(prepared(array="0-2", run_dir="r"))
    assert not (tmp_path / "r").exists()
    run = submit_prepared(prepared(array="0-1", run_dir="r"))
    run.wait(timeout=20)
    monkeypatch.setattr("hpctrain.jobs.backends.local.subprocess.Popen", refuse)
    with pytest.raises(SchedulerError, match="no more processes"):
        submit_prepared(prepared(array="1-2", run_dir="r"))
    assert states(run) == ["COMPLETED", "COMPLETED"]
    assert not run_processes(run.dir.path)


def test_every_task_of_a_large_array_is_followed(tmp_path):
    """More of them than one look goes through."""
    array = RunDir(tmp_path / "r")
    for index in range(150):
        task = array.task(index)
        task.attempt_logs(0).mkdir(parents=True)
        task.log_event("submitted", 0, job_id=f"17_{index}", backend="local")
        task.rank_log(0, 0).write_text("here")
        task.log_event("finished", 0, state="COMPLETED")
    array.log_event("submitted", 0, job_id="17", backend="local")
    *items, last = follow_run(Run(array, {}), whole=False)
    assert last.tasks == {"COMPLETED": 150}
    lines = [item.text for item in items if isinstance(item, LogText)]
    assert sorted(lines) == sorted(f"{f'[task-{index}]':<10} here\n" for index in range(150))
