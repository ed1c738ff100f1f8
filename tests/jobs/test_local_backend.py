"""Submission to the local backend, with a fake supervisor."""

import sys
import threading

import pytest
from helpers.waiting import wait_for

from hpctrain.errors import RunFailed, SchedulerError, SpecError, WaitTimeout
from hpctrain.files import read_json_lines
from hpctrain.jobs.backends import local
from hpctrain.jobs.submit import submit_prepared as submit_module
from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import JobRecord, RunState

#: They start many processes or trainings, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow


def test_active_run_refuses_another_submission_and_can_be_cancelled(prepared, tmp_path):
    run, _ = submit_prepared(prepared("sleep", run_dir="r"))
    wait_for(lambda: run.log_path(), 20, "the first attempt")
    assert run.status().state is RunState.RUNNING
    with pytest.raises(SpecError, match="still active"):
        submit_prepared(prepared(run_dir="r"))
    with pytest.raises(WaitTimeout, match="RUNNING"):
        run.wait(timeout=0.1)
    run.cancel()
    with pytest.raises(RunFailed, match="cancelled"):
        run.wait(timeout=120)
    assert run.cancel().state is RunState.CANCELLED
    with pytest.raises(SpecError, match="CANCELLED"):
        run.requeue()


def test_array_task_that_starts_during_a_query_has_not_failed(tmp_path, monkeypatch):
    task = RunDir(tmp_path).task(0)
    queried = []

    def is_locked(path):
        queried.append(path)
        return path == task.array.lock or queried.count(path) > 1

    monkeypatch.setattr(local, "is_locked", is_locked)
    (view,) = local.LocalBackend({}).query([JobRecord("1_0", task)])
    assert view.state is RunState.PENDING


@pytest.mark.ranks
def test_requeue_waits_until_the_ranks_can_be_signalled(prepared, script):
    """The signal would end a job script that is still starting, and the run with it."""
    script.write_text("import os, time\ntime.sleep(60 * (os.environ['HPCTRAIN_ATTEMPT'] == '0'))\n")
    run, _ = submit_prepared(prepared(python=sys.executable))
    run.requeue()
    assert run.wait(timeout=120).attempt == 1


@pytest.mark.ranks
def test_ranks_use_the_requested_cpus(prepared, script):
    script.write_text("import os\nprint(os.environ['OMP_NUM_THREADS'])\n")
    run, _ = submit_prepared(prepared(python=sys.executable, nodes=2, cpus_per_task=3))
    run.wait(timeout=120)
    assert [run.log_path(rank).read_text() for rank in (0, 1)] == ["3\n", "3\n"]


def test_starting_job_script_is_not_requeued_but_can_be_cancelled(prepared, monkeypatch):
    monkeypatch.setattr(local, "_START_LIMIT_S", 0.2)
    run, _ = submit_prepared(prepared(setup=["sleep 60"]))
    with pytest.raises(SchedulerError, match="have not started yet"):
        run.requeue()
    assert run.status().state is RunState.RUNNING
    run.cancel()
    with pytest.raises(RunFailed, match="cancelled"):
        run.wait(timeout=120)  # Processes of the script would still hold the lock.


def test_ended_run_can_be_resubmitted(prepared):
    run, _ = submit_prepared(prepared("fail", run_dir="r"))
    with pytest.raises(RunFailed, match=r"rank 3 crashed: RuntimeError: boom\. Log: .*rank-00000.log"):
        run.wait(timeout=120)
    run.dir.cancel_request.touch()
    resubmitted, _ = submit_prepared(prepared(run_dir="r", nodes=2))
    status = resubmitted.wait(timeout=120)
    assert (status.attempt, resubmitted.dir.cancel_request.exists()) == (1, False)
    assert [
        event["attempt"] for event in read_json_lines(resubmitted.dir.events) if event["kind"] == "submitted"
    ] == [0, 1]


def test_changes_of_a_resubmitted_run_are_reported(prepared):
    run, _ = submit_prepared(prepared("--lr", "0.1", run_dir="r"))
    run.wait(timeout=120)
    (note,) = prepared("--lr", "0.5", run_dir="r").notes
    assert "continues with arguments '--lr 0.5' instead of '--lr 0.1'" in note
    assert prepared("--lr", "0.1", run_dir="r").notes == ()


def test_vanished_supervisor_is_a_failure_with_a_log(prepared):
    run, _ = submit_prepared(prepared("vanish"))
    with pytest.raises(RunFailed, match=r"exited without reporting a result.*slurm\.log"):
        run.wait(timeout=120)


def test_one_of_several_concurrent_submissions_wins(prepared):
    outcomes = []

    def try_submission(submission):
        try:
            outcomes.append(submit_prepared(submission)[0])
        except SpecError as error:
            outcomes.append(error)

    threads = [
        threading.Thread(target=try_submission, args=(prepared("sleep", run_dir="r"),)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    (run,) = [outcome for outcome in outcomes if not isinstance(outcome, SpecError)]
    assert len(outcomes) == 4
    wait_for(lambda: run.log_path(), 20, "the first attempt")
    run.cancel()
    run.wait_for_end(timeout=120)


def test_python_api_submits_with_this_interpreter(script, tmp_path, monkeypatch, caplog):
    import hpctrain

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match="Did you mean 'nodes'"):
        hpctrain.submit(script, nodez=2)
    submissions = []
    monkeypatch.setattr(
        submit_module, "submit_prepared", lambda submission: (submissions.append(submission), "")
    )
    hpctrain.submit(script, ["--lr", 0.1], nodes=2, backend="local", partition="p")
    assert (submissions[0].spec.python, submissions[0].spec.args) == (sys.executable, ("--lr", "0.1"))
    assert "ignores these Slurm options: --partition" in caplog.text
