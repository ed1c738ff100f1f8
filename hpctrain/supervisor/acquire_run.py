"""Decide from the run's record whether this job must train, and record it as the run's newest job."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress

from hpctrain import system
from hpctrain.checkpoint.listing import newest_script_checkpoint
from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.record_types import Event, StepRecord
from hpctrain.records.checkpoint_health import record_script_checkpoint
from hpctrain.records.lease import LeaseHeld
from hpctrain.records.log_tail import read_last_records
from hpctrain.records.run_record import RunRecord, read_run_record, summarize_events
from hpctrain.records.submit_successor import claim_successor, record_successor
from hpctrain.rundir import RunDir
from hpctrain.supervisor.job_control import JobControl, SlurmSuccessors
from hpctrain.supervisor.policy.job_intent import OwnershipDecision, OwnershipState, decide_ownership
from hpctrain.supervisor.run_end import finish_run

log = logging.getLogger(__name__)

#: `hpctrain submit` records a job within milliseconds of its submission.
_RECORD_LIMIT_S = 10.0
#: The newest of these events explains the next start of the ranks, unless it is `started`.
_TURNS = ("submitted", "started", "restart", "shrink", "replace", "requeue", "finished")


class NotInJob(SpecError):
    """This process must not change the run or its record: it is not the job that trains."""


def check_in_job(run: RunDir, spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Check that the script of a Slurm job runs in a Slurm job, and that of an array in one of its tasks."""
    is_in_job = "SLURM_JOB_ID" in environ and "SLURM_JOB_NODELIST" in environ and spec.array is None
    if spec.backend == "slurm" and not is_in_job:
        raise _not_submitted(run.array or run, "This process")


def _not_submitted(run: RunDir, job: str) -> NotInJob:
    return NotInJob(
        f"{job} was not submitted by hpctrain, or another job has replaced it, so it starts nothing. To "
        f"continue the run, use hpctrain resume {shlex.quote(str(run.path))}"
    )


def run_of_this_job(run: RunDir, environ: Mapping[str, str]) -> RunDir:
    """Return the run of this job; in a job array under Slurm, a task of the array."""
    task = run.task(environ.get("SLURM_ARRAY_TASK_ID", ""))
    return task if task.spec.exists() else run


def acquire_run(run: RunDir, spec: JobSpec, job_control: JobControl, deaths: int = 0) -> int | None:
    """Acquire the lease and record this job as the newest, if it must train; else, return its exit code."""
    state = _ownership_state(run, job_control)
    decision = decide_ownership(state)
    facts = ", ".join(f"{name}: {value}" for name, value in vars(state).items() if value)
    log.info("job %s: %s (%s)", job_control.job_id, decision.value, facts)
    match decision:
        case OwnershipDecision.SUPERSEDED:
            return 0
        case OwnershipDecision.OVER:
            return _over(run, recorded_end(run.read_events()))
        case OwnershipDecision.CANCEL:
            return finish_run(run, "CANCELLED")
    if job_control.successors is not None:
        _acquire_lease(run, job_control.successors, deaths)
    if state.predecessor is None:
        register_job(run, spec, job_control.job_id)
    if (end := recorded_end(run.read_events())) is not None:
        # The run has ended in the meantime.
        return _over(run, end)
    if state.predecessor is not None and state.newest != job_control.job_id:
        # The predecessor was killed before it could record this job.
        record_successor(run, job_control.job_id, state.predecessor)
    if job_control.successors is not None and job_control.successors.restarts and not deaths:
        _record_requeue(run, spec, job_control.successors)
    return None


def _over(run: RunDir, end: Event | None) -> int:
    if end is not None and end.state == "FAILED":
        resume = f"hpctrain resume {shlex.quote(str(run.path))}"
        print(f"The run has failed, so this job exits. To continue the run, use {resume}")
    return end.exit_code or 0 if end is not None else 0


def _ownership_state(run: RunDir, job_control: JobControl) -> OwnershipState:
    end, record = recorded_end(run.read_events()), read_run_record(run)
    jobs = job_control.successors
    predecessor = jobs.predecessor if jobs is not None else None
    return OwnershipState(
        job_control.job_id,
        newest=record.job_id,
        newest_after=record.submitted.after if record.submitted else None,
        ended=end.state if end else None,
        cancelled=run.cancel_request.exists(),
        predecessor=predecessor,
        claimed_by=claim_successor(run, job_control.job_id, predecessor) if predecessor else None,
        successor=_successor(run, record, job_control),
    )


def recorded_end(events: Iterable[Event]) -> Event | None:
    """Return the end of the run since the user's last submission; None if ranks were started afterwards.

    A successor may be recorded after the end: the supervisor of a killed batch script submits it in a thread.
    """
    end: Event | None = None
    for event in events:
        if event.kind == "finished":
            end = event
        elif event.kind == "started" or event.is_new_submission:
            end = None
    return end


def _acquire_lease(run: RunDir, jobs: SlurmSuccessors, deaths: int) -> None:
    """Acquire the lease of the run folder; a full disk does not prevent training."""
    try:
        jobs.lease.acquire(jobs.predecessor, deaths)
    except LeaseHeld as error:
        holder = error.holder
        raise NotInJob(
            f"The run in {str(run.path)!r} is still active as job {holder.job_id}: its supervisor (process "
            f"{holder.pid} on {holder.host}) holds the lease on the folder. Wait for the run to end, or "
            "cancel it."
        ) from None
    except OSError as error:
        log.warning("cannot acquire the lease on the run folder, so another job could train in it: %s", error)


def _successor(run: RunDir, record: RunRecord, job_control: JobControl) -> str | None:
    """Return the successor of this job, if Slurm requeued this job after submitting it."""
    job_id = job_control.job_id
    if (successor := recorded_successor(run.read_events(), job_id)) is not None:
        return successor
    if record.job_id != job_id or record.handover is None or job_control.successors is None:
        return None
    try:
        successor = job_control.successors.find()
    except SchedulerError as error:
        # An existing successor waits for the end of this job, and then finds a completed run.
        log.warning("cannot determine whether job %s has a successor (%s); assuming none", job_id, error)
        return None
    if successor is not None:
        record_successor(run, successor, job_id)
    return successor


def recorded_successor(events: Iterable[Event], job_id: str) -> str | None:
    jobs_after = (event.job_id for event in events if event.kind == "submitted" and event.after == job_id)
    return next(jobs_after, None)


def register_job(run: RunDir, spec: JobSpec, job_id: str) -> None:
    """Wait until this job is recorded as the newest job of the run, so that later events belong to it.

    The job may start before `hpctrain submit` records it. If `submit` was killed in between, this function
    records the first job of the run.
    """
    deadline, pause_s = system.monotonic() + _RECORD_LIMIT_S, 0.02
    while (newest := summarize_events(run, reversed([*run.read_events()])).job_id) != job_id:
        if system.monotonic() >= deadline:
            if newest is not None:
                raise _not_submitted(run, f"Job {job_id}")
            run.log_event("submitted", 0, job_id=job_id, backend=spec.backend)
            return
        system.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)


def _record_requeue(run: RunDir, spec: JobSpec, jobs: SlurmSuccessors) -> None:
    """Record the requeue before this start of the job if the previous supervisor did not request it.

    That supervisor may have been killed before it could record the requeue, and the script's checkpoint.
    """
    events = [*run.read_events()]
    newest = next((event for event in reversed(events) if event.kind in _TURNS), None)
    if newest is None or newest.kind != "started":
        return
    attempt = newest.attempt
    saved = newest_script_checkpoint(run.checkpoints, spec.checkpoints)
    if saved is not None and saved[1] > newest.time:
        record_script_checkpoint(run, attempt, *saved)
    times = [events[-1].time]
    with suppress(OSError):
        if (step := next(read_last_records(run.metrics, StepRecord), None)) is not None:
            times.append(step.time)
    fields: dict[str, object] = {"by": "slurm", "cause": "requeued by Slurm, which logged no reason"}
    if (found := jobs.find_requeue(newest.time)) is not None:
        times.append(found[0])
        fields |= {"cause": found[1], "seconds": round(max(times) - newest.time, 3)}
    elif events[-1].kind == "failure":
        fields["cause"] = events[-1].cause
    run.log_event("requeue", attempt, time=min(max(times), system.time()), **fields)
