"""The status of a run from its own events and the answers of fake Slurm commands."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.fake_slurm import UNREACHABLE, FakeSlurm, queued, recorded, shown

from hpctrain.errors import SchedulerError
from hpctrain.files import read_json_lines
from hpctrain.jobs.backends.slurm import SlurmBackend
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.status_poller import UnknownStateTracker
from hpctrain.records import checkpoint_health, submit_successor
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import JobRecord, JobStateView, RunState

PENDING, RUNNING, UNKNOWN = RunState.PENDING, RunState.RUNNING, RunState.UNKNOWN


def query(fake_slurm: FakeSlurm, *jobs: str, **fields: object) -> list[JobStateView]:
    folder = RunDir(Path("/home/me/runs/r"))
    records = [JobRecord(job, folder, **{"submitted": time.time(), **fields}) for job in jobs]
    return SlurmBackend(fake_slurm.environ).query(records)


@pytest.fixture
def run(fake_slurm, tmp_path) -> Run:
    """A run whose job is number 17."""
    run = Run(RunDir(tmp_path / "r"), fake_slurm.environ)
    run.dir.path.mkdir()
    run.dir.log_event("submitted", 0, job_id="17", backend="slurm")
    return run


def silence(run: Run, seconds: float) -> None:
    """Set the time of the run's last write that many seconds back."""
    event = f'{{"time": {time.time() - seconds}, "attempt": 0, "kind": "submitted", "job_id": "17"'
    run.dir.events.write_text(f'{event}, "backend": "slurm"}}\n')
    os.utime(run.dir.events, (0, time.time() - seconds))


def test_trial_whose_early_stop_was_not_recorded_is_stopped_early(fake_slurm, run):
    """Its supervisor was killed after its job had stopped the ranks."""
    fake_slurm.answer("squeue", queued("17", "COMPLETED"))
    fake_slurm.controller()
    assert run.status().state is RunState.FAILED
    run.dir.cancel_request.write_text("stopped early at step 10\n")
    assert run.status().state is RunState.STOPPED_EARLY
    run.dir.cancel_request.write_text("")
    assert run.status().state is RunState.CANCELLED


def test_jobs_are_queried_at_once(fake_slurm):
    rows = [
        queued("17", "RUNNING"),
        queued("18", "PENDING", 1, "BeginTime"),
        queued("19", "PENDING", 0, "QOSMaxJobsPerUserLimit"),
        queued("20", "OUT_OF_MEMORY", 0, "OutOfMemory"),
        queued("21", "COMPLETING"),
        queued("22", "QUANTUM"),
    ]
    fake_slurm.answer("squeue", "".join(rows))
    assert query(fake_slurm, "17", "18", "19", "20", "21", "22") == [
        JobStateView(RUNNING, job_state="RUNNING"),
        JobStateView(
            PENDING,
            "BeginTime: waiting for its start time; Slurm delays requeued jobs by 2 minutes",
            held=True,
            job_state="PENDING",
        ),
        JobStateView(
            PENDING,
            "QOSMaxJobsPerUserLimit: together with your running jobs, the job exceeds the limit of the QOS "
            "for jobs; `sacctmgr show qos` lists the limits",
            job_state="PENDING",
        ),
        JobStateView(RunState.FAILED, "Slurm reports OUT_OF_MEMORY", job_state="OUT_OF_MEMORY"),
        JobStateView(RUNNING, "COMPLETING", job_state="COMPLETING"),
        JobStateView(UNKNOWN, "Slurm reports QUANTUM", job_state="QUANTUM"),
    ]
    assert fake_slurm.calls == ["squeue"]


def test_parts_of_a_job_are_merged_or_distinguished(fake_slurm):
    tasks = [queued("17_1", "RUNNING", raw="18"), queued("17_2", "PENDING", 0, "Priority", raw="17")]
    components = [queued("30+0", "RUNNING", raw="30"), queued("30+1", "COMPLETED", raw="31")]
    fake_slurm.answer("squeue", "".join(tasks + components))
    merged, first, second, by_number, het = query(fake_slurm, "17", "17_1", "17_2", "18", "30")
    assert merged == JobStateView(
        RUNNING,
        "2 parts: 1 RUNNING, 1 PENDING; Priority: jobs with a higher priority are waiting",
        job_state="RUNNING",
    )
    assert first == by_number == JobStateView(RUNNING, job_state="RUNNING")
    assert second.state is PENDING
    assert (het.state, het.words) == (RUNNING, "2 parts: 1 RUNNING, 1 COMPLETED; Slurm reports COMPLETED")


@pytest.mark.parametrize(
    ("restarts", "in_s", "held"), [(0, 100, False), (1, 100, True), (1, 5, False), (1, None, True)]
)
def test_only_a_requeue_delay_is_a_hold(fake_slurm, restarts, in_s, held):
    begin = "N/A" if in_s is None else time.strftime("%FT%T", time.localtime(time.time() + in_s))
    fake_slurm.answer("squeue", queued("17", "PENDING", restarts, "BeginTime", eligible_at=begin))
    assert query(fake_slurm, "17")[0].held is held


@pytest.mark.parametrize("message", [UNREACHABLE, "slurm_load_jobs error: Socket timed out on send/recv\n"])
def test_unreachable_controller_means_unknown(fake_slurm, message):
    """SkyPilot deletes a live cluster after one failed squeue."""
    fake_slurm.answer("squeue", stderr=message, code=1)
    (view,) = query(fake_slurm, "17", submitted=0.0)
    assert view == JobStateView(UNKNOWN, f"squeue failed: {message.strip()}")
    assert "scontrol" not in fake_slurm.calls  # it would fail the same way


def test_without_controller_only_an_end_in_accounting_counts(fake_slurm):
    fake_slurm.answer("squeue", stderr=UNREACHABLE, code=1)
    lines = [
        recorded("17", "COMPLETED"),
        recorded("18", "CANCELLED by 0"),
        recorded("19", "RUNNING"),
        recorded("20", "PREEMPTED"),
        recorded("21_[4-9%2]", "PENDING"),
        recorded("23_[0-3,9%2]", "CANCELLED by 0"),
        recorded("23_2", "COMPLETED"),
    ]
    fake_slurm.answer("sacct", "".join(lines))
    views = query(fake_slurm, "17", "18", "19", "20", "21_7", "22")
    assert [view.state for view in views] == [RunState.COMPLETED, RunState.CANCELLED, *[RunState.UNKNOWN] * 4]
    assert views[1].job_state == "CANCELLED"
    assert "the last known state is PREEMPTED, but the job may have been requeued" in views[3].words
    # Tasks that never started share a record until one gets its own.
    parts = query(fake_slurm, "23_1", "23_9", "23_2", "23_4")
    assert [part.state for part in parts] == [*[RunState.CANCELLED] * 2, RunState.COMPLETED, UNKNOWN]


def test_empty_queue_does_not_prove_an_end(fake_slurm):
    """Here, squeue prints nothing with exit code 0, but scontrol still shows the job."""
    fake_slurm.controller(shown("17", "RUNNING"))
    assert query(fake_slurm, "17", submitted=0.0) == [JobStateView(RUNNING, job_state="RUNNING")]
    assert fake_slurm.calls == ["squeue", "sacct", "scontrol"]


def test_outdated_accounting_does_not_end_a_requeued_run(fake_slurm):
    """MFC takes PREEMPTED in sacct for the end of a requeued run that continued."""
    fake_slurm.answer("sacct", recorded("17", "PREEMPTED"))
    fake_slurm.answer("squeue", queued("17", "PENDING", 1, "Resources"))
    assert query(fake_slurm, "17")[0].state is PENDING
    fake_slurm.answer("squeue")
    fake_slurm.controller(shown("17", "PENDING"))
    assert query(fake_slurm, "17")[0].state is PENDING
    fake_slurm.controller()
    assert query(fake_slurm, "17") == [
        JobStateView(RunState.FAILED, "Slurm reports PREEMPTED", job_state="PREEMPTED")
    ]


def test_pending_tasks_share_a_record(fake_slurm):
    fake_slurm.controller(
        shown("17", "PENDING", head=" ArrayJobId=17 ArrayTaskId=3-5,9%2 ArrayTaskThrottle=2")
        + shown("19", "RUNNING", head=" ArrayJobId=17 ArrayTaskId=2")
        + shown("31", "RUNNING", head=" HetJobId=30 HetJobOffset=1")
    )
    views = query(fake_slurm, "17_4", "17_9", "17_2", "30", "17_6")
    assert [view.state for view in views] == [PENDING, PENDING, RUNNING, RUNNING, UNKNOWN]


def test_forgotten_job_ends_only_after_slurms_memory_and_the_runs_silence(run, fake_slurm):
    """Parsl waits forever, others fail at once: a job that disappears between two queries."""
    status = run.status()
    assert status.state is UNKNOWN
    assert status.words.startswith(
        "Slurm has no record of job 17, although Slurm keeps records of finished jobs for 300 s"
    )
    assert status.unknown_s is not None
    assert status.unknown_s < 60
    silence(run, 400)
    assert run.status().state is RunState.FAILED
    assert (
        run.status().cause == "Slurm has no record of job 17, and the run has not written anything for 400 s"
    )
    run.dir.metrics.write_text('{"step": 3}\n')
    assert run.status().state is UNKNOWN


def test_reused_job_id_does_not_affect_the_run(run, fake_slurm):
    """A reinstalled cluster counts its jobs from 1 again."""
    fake_slurm.answer("squeue", queued("17", "RUNNING", workdir="/home/you/x"))
    fake_slurm.answer("sacct", recorded("17", "COMPLETED", workdir="/home/you/x"))
    assert run.status().state is UNKNOWN
    silence(run, 400)
    assert run.status().state is RunState.FAILED
    run.cancel()
    assert "scancel" not in fake_slurm.calls


def test_observed_end_outlasts_slurms_memory(run, fake_slurm):
    fake_slurm.answer("squeue", queued("17", "CANCELLED"))
    assert run.status().state is RunState.CANCELLED
    assert run.status().job_state == "CANCELLED"
    assert [event["kind"] for event in read_json_lines(run.dir.events)] == ["submitted", "seen"]
    fake_slurm.answer("squeue")
    assert run.status().state is RunState.CANCELLED
    # Slurm reports a requeue that was not observed.
    fake_slurm.answer("squeue", queued("17", "PENDING", 1))
    assert run.status().state is PENDING
    run.dir.log_event("started", 1)
    fake_slurm.answer("squeue")
    assert run.status().state is UNKNOWN


@pytest.mark.parametrize(
    ("finished", "view", "cancel", "state"),
    [
        ("COMPLETED", None, False, RunState.COMPLETED),
        ("FAILED", None, False, RunState.FAILED),
        (None, "RUNNING", False, RunState.RUNNING),
        (None, "NODE_FAIL", False, RunState.FAILED),
        (None, "NODE_FAIL", True, RunState.CANCELLED),
        (None, "CANCELLED by 0", False, RunState.CANCELLED),
        (None, "COMPLETED", False, RunState.FAILED),
    ],
)
def test_recorded_end_takes_precedence_over_slurm(run, fake_slurm, finished, view, cancel, state):
    # An earlier submission's end must not count.
    run.dir.events.unlink()
    run.dir.log_event("finished", 0, state="FAILED", cause="old")
    run.dir.log_event("submitted", 1, job_id="17", backend="slurm")
    if cancel:
        run.dir.cancel_request.touch()
    if finished:
        run.dir.log_event("finished", 1, state=finished, cause="new")
    fake_slurm.answer("squeue", queued("17", view or "RUNNING"))
    status = run.status()
    assert status.state is state
    if state is not RunState.FAILED or finished:
        assert status.cause == ("new" if finished and state is RunState.FAILED else None)
    else:
        assert status.cause.startswith(f"Slurm reports {view}")
        assert "before any rank started" in status.cause


def test_unknown_state_ends_the_wait_only_without_any_sign_of_the_run(run, fake_slurm, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    known = run.status()
    tracker = UnknownStateTracker(limit_s=100)
    unknown = replace(known, state=UNKNOWN, words="squeue is silent", unknown_s=5000.0)
    assert tracker.left_s == float("inf")
    assert "unknown for 5000 s (squeue is silent)" in tracker.message_for(unknown)
    now += 59
    assert tracker.message_for(unknown) is None
    assert tracker.left_s == 41
    now += 40.5
    assert tracker.message_for(unknown) is not None
    now += 1
    # The run still writes.
    assert tracker.message_for(replace(unknown, unknown_s=99.0)) is None
    with pytest.raises(SchedulerError, match=r"run r after 100 s \(state: unknown for 5000 s"):
        tracker.message_for(unknown)
    assert tracker.message_for(replace(known, state=RUNNING)) == "the state is available again (RUNNING)"
    assert tracker.left_s == float("inf")
    now += 500
    assert "this does not affect the run" in tracker.message_for(unknown)


def test_overcome_failure_is_not_the_cause(fake_slurm, run):
    fake_slurm.answer("squeue", queued("17", "NODE_FAIL", workdir=str(run.dir.path)))
    run.dir.log_event("started", 0, nodes=1)
    run.dir.log_event("failure", 0, rank=3, host="n1", cause="rank 3 crashed", log="/a log")
    assert run.status().cause == "rank 3 crashed"
    run.dir.log_event("restart", 0)
    run.dir.log_event("started", 1, nodes=1)
    run.dir.log_event("failure", 1, cause="no space for a checkpoint")
    status = run.status()
    assert (status.state, status.cause) == (RunState.FAILED, "Slurm reports NODE_FAIL")
    assert status.log == str(run.dir.slurm_log)


def test_successor_that_completed_during_the_lookup_is_not_recorded_again(fake_slurm, run, monkeypatch):
    fake_slurm.answer("squeue", queued("17", "COMPLETED", workdir=str(run.dir.path)))
    run.dir.log_event("handover", 0, job_id="17")

    def find_late(run_dir, job_id, environ):
        run_dir.log_event("submitted", 1, job_id="18", backend="slurm", after=job_id)
        run_dir.log_event("started", 1, nodes=1)
        run_dir.log_event("finished", 1, state="COMPLETED", exit_code=0, cause=None)
        return "18"

    monkeypatch.setattr(submit_successor, "find_successor", find_late)
    status = run.status()
    assert (status.state, status.job_id) == (RunState.COMPLETED, "18")


def test_running_run_that_cannot_save_reports_why_and_since_when(fake_slurm, run, monkeypatch):
    fake_slurm.answer("squeue", queued("17", "RUNNING", workdir=str(run.dir.path)))
    run.dir.log_event("started", 0, nodes=1)
    assert run.status().not_saved is None
    run.dir.log_event("failure", 0, rank=3, host="n1", cause="rank 3 crashed", log="/a log")
    assert run.status().not_saved is None
    run.dir.log_event("failure", 0, cause="no space for a checkpoint")
    assert run.status().not_saved == "no checkpoint yet: no space for a checkpoint"
    run.dir.log_event("checkpoint", 0, step=7, path="x")
    assert run.status().not_saved is None, "it works again"
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert run.status().not_saved == f"no checkpoint yet: disk full at {run.dir.path}"
    monkeypatch.setattr(checkpoint_health, "committed_steps", lambda folder: {3, 7})
    run.dir.checkpoint(7).mkdir(parents=True)
    assert run.status().not_saved.startswith("no checkpoint since step 7 (20")
