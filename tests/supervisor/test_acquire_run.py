"""A job that was started manually while the run's record names another."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpctrain.errors import SchedulerError
from hpctrain.rundir import RunDir
from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor import acquire_run
from hpctrain.supervisor.acquire_run import NotInJob, RunActive, check_in_job, register_job
from hpctrain.supervisor.policy.outcome import Continue, Exit


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch):
    monkeypatch.setattr(acquire_run, "_RECORD_LIMIT_S", 0.0)


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path)
    run.log_event("submitted", 0, job_id="7", backend="slurm")
    return run


@pytest.fixture
def spec(run) -> JobSpec:
    folder = str(run.path)
    return JobSpec(
        script="/x.py", name="x", run_id="x", run_dir=folder, backend="slurm", python="/p", workdir="/"
    )


def other_jobs(is_running=lambda job_id: False, submitted_at=None):
    """Return the run's other jobs, as Slurm reports them."""
    return SimpleNamespace(is_running=is_running, submitted_at=lambda: submitted_at)


def newest_job(run):
    return [event["job_id"] for event in run.read_events() if event["kind"] == "submitted"][-1]


@pytest.mark.parametrize("is_running", [lambda job_id: job_id == "7", SchedulerError("no answer")])
def test_manual_job_is_refused_while_another_may_train(run, spec, is_running):
    def query(job_id):
        if isinstance(is_running, SchedulerError):
            raise is_running
        return is_running(job_id)

    with pytest.raises(RunActive, match="job 7"):
        register_job(run, spec, "8", other_jobs(query))
    assert newest_job(run) == "7"


def test_pending_job_is_replaced_and_refused_when_it_starts(run, spec):
    assert register_job(run, spec, "8", other_jobs()) == Continue()
    assert newest_job(run) == "8"
    with pytest.raises(RunActive, match="job 8"):
        register_job(run, spec, "7", other_jobs(lambda job_id: job_id == "8"))


def test_job_of_an_ended_run_is_not_queried(run, spec):
    run.log_event("finished", 0, state="FAILED", exit_code=4, cause="x")
    assert register_job(run, spec, "8", other_jobs(lambda job_id: True)) == Continue()
    assert newest_job(run) == "8"


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETED"])
def test_manual_job_submitted_before_the_end_starts_nothing(run, spec, state):
    run.log_event("finished", 0, state=state, exit_code=0, cause=None)
    submitted = time.time() - 5
    before = list(run.read_events())
    if state == "CANCELLED":
        with pytest.raises(NotInJob, match="was cancelled after job 8 was submitted manually"):
            register_job(run, spec, "8", other_jobs(submitted_at=submitted))
    else:
        assert register_job(run, spec, "8", other_jobs(submitted_at=submitted)) == Exit(0)
    assert list(run.read_events()) == before


def test_job_requeued_after_the_failure_of_another_exits_with_its_code(run, spec, capsys):
    run.log_event("submitted", 0, job_id="8", backend="slurm", by_hand=True)
    run.log_event("finished", 0, state="FAILED", exit_code=4, cause="x")
    assert register_job(run, spec, "7", other_jobs()) == Exit(4)
    assert newest_job(run) == "8"
    assert f"To continue the run, use hpctrain resume {run.path}" in capsys.readouterr().out


def test_manual_job_is_refused_if_it_cannot_acquire_the_lease(run, spec):
    run.log_event("finished", 0, state="FAILED", exit_code=4, cause="x")
    with pytest.raises(NotInJob, match="cannot acquire the lease on the run folder: no space"):
        register_job(run, spec, "8", other_jobs(), OSError("no space"))
    assert newest_job(run) == "7"
    run.log_event("submitted", 1, job_id="8", backend="slurm")
    assert register_job(run, spec, "8", other_jobs(), OSError("no space")) == Continue()


def test_requeued_job_of_a_failed_run_exits_with_its_code(run, spec, capsys):
    """Slurm requeues a job that is preempted, or loses a node, while its supervisor is exiting."""
    run.log_event("finished", 0, state="FAILED", exit_code=4, cause="x")
    job_control = SimpleNamespace(job_id="7", successors=SimpleNamespace(predecessor=None))
    assert acquire_run.acquire_run(run, spec, job_control) == Exit(4)
    assert f"To continue the run, use hpctrain resume {run.path}" in capsys.readouterr().out


def test_run_with_an_unrecorded_cancellation_is_cancelled(run, spec):
    run.cancel_request.touch()
    submitted = time.time() - 5
    with pytest.raises(NotInJob, match="was cancelled after job 8 was submitted manually"):
        register_job(run, spec, "8", other_jobs(submitted_at=submitted))
    assert register_job(run, spec, "9", other_jobs(submitted_at=time.time() + 5)) == Continue()
    assert newest_job(run) == "9"


@pytest.mark.parametrize(("state", "after_s"), [("FAILED", -5), ("CANCELLED", 5), ("COMPLETED", 5)])
def test_manual_job_restarts_an_ended_run(run, spec, state, after_s):
    """Submitted later, or during a run that has failed; an earlier cancel request is void."""
    run.cancel_request.touch()
    run.log_event("finished", 0, state=state, exit_code=0, cause=None)
    assert register_job(run, spec, "8", other_jobs(submitted_at=time.time() + after_s)) == Continue()
    assert newest_job(run) == "8"
    assert not run.cancel_request.exists()


def test_successor_exits_if_the_run_ends_while_it_waits_for_the_lease(run, spec):
    def acquire(predecessor, deaths):
        run.log_event("finished", 0, state="COMPLETED", exit_code=0, cause=None)

    lease = SimpleNamespace(acquire=acquire)
    job_control = SimpleNamespace(job_id="8", successors=SimpleNamespace(predecessor="7", lease=lease))
    assert acquire_run.acquire_run(run, spec, job_control) == Exit(0)
    assert newest_job(run) == "7"


def test_one_of_two_successors_continues_after_the_other_was_recorded(run, spec):
    """Slurm accepted job 8 so late that the supervisor also submitted, and recorded, job 9."""
    run.log_event("handover", 0, job_id="7")
    run.log_event("submitted", 1, job_id="9", backend="slurm", after="7")
    lease = SimpleNamespace(acquire=lambda predecessor, deaths: None)
    found = {}
    for job_id in ("8", "9"):
        successors = SimpleNamespace(predecessor="7", lease=lease)
        job_control = SimpleNamespace(job_id=job_id, successors=successors)
        found[job_id] = acquire_run.acquire_run(run, spec, job_control)
    assert found == {"8": Continue(), "9": Exit(0)}
    assert newest_job(run) == "8"


@pytest.mark.parametrize("array", [None, "0-1"])
def test_slurm_script_must_run_in_a_job(run, spec, array):
    spec = replace(spec, array=array)
    with pytest.raises(NotInJob, match=r"not in a Slurm job .* may still be active as job 7\. .* sbatch "):
        check_in_job(run, spec, {})
    job_variables = {"SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": "n1"}
    if array is None:
        check_in_job(run, spec, job_variables)
    else:
        with pytest.raises(NotInJob, match="not a task of the array"):
            check_in_job(run, spec, job_variables)
