"""A job script that nobody recorded, where the record names another job."""

from __future__ import annotations

import pytest

from hpctrain.errors import SchedulerError
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.supervisor import submission
from hpctrain.supervisor.submission import StillGoing, join_record


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch):
    monkeypatch.setattr(submission, "_RECORD_LIMIT_S", 0.0)


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


def newest(run):
    return [event["job_id"] for event in run.read_events() if event["kind"] == "submitted"][-1]


@pytest.mark.parametrize("is_running", [lambda job_id: job_id == "7", SchedulerError("no answer")])
def test_while_another_job_may_train_it_is_left_alone(run, spec, is_running):
    def ask(job_id):
        if isinstance(is_running, SchedulerError):
            raise is_running
        return is_running(job_id)

    with pytest.raises(StillGoing, match="job 7"):
        join_record(run, spec, "8", ask)
    assert newest(run) == "7"


def test_a_job_that_waits_is_overtaken_and_refused_when_it_starts(run, spec):
    assert join_record(run, spec, "8", lambda job_id: False) is None
    assert newest(run) == "8"
    with pytest.raises(StillGoing, match="job 8"):
        join_record(run, spec, "7", lambda job_id: job_id == "8")


def test_whoever_ended_is_not_asked_after(run, spec):
    run.log_event("finished", 0, state="FAILED", exit_code=4, cause="x")
    assert join_record(run, spec, "8", lambda job_id: True) is None
    assert newest(run) == "8"
