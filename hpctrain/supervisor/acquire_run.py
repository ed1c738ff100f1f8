"""Check of the run's record before the supervisor starts: origin of this job, and state of the run."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from hpctrain import system
from hpctrain.errors import SchedulerError, SpecError
from hpctrain.files import try_lock
from hpctrain.records.lease import LeaseHeld
from hpctrain.records.run_record import RunRecord, read_run_record
from hpctrain.records.successor import claim_successor, record_successor
from hpctrain.rundir import STOPPED_EARLY, RunDir, is_new_submission
from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor.job_control.base import JobControl, SuccessorJobs
from hpctrain.supervisor.policy.job_intent import OwnershipDecision, OwnershipState, decide_ownership
from hpctrain.supervisor.policy.outcome import Continue, Exit
from hpctrain.supervisor.run_end import finish_run

log = logging.getLogger(__name__)

#: `hpctrain submit` records a job within milliseconds of its submission.
_RECORD_LIMIT_S = 10.0


class NotInJob(SpecError):
    """The job's script was started manually: this process must not change the run or its record."""


class RunActive(NotInJob):
    """Another job of the run is active."""


def check_in_job(run: RunDir, spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Check that the script of a Slurm job runs in a Slurm job.

    Raises:
        NotInJob: the script does not run in a job, or belongs to a job array but does not run in a task.
    """
    if spec.backend != "slurm":
        return
    script = shlex.quote(str((run.array or run).job_script))
    outside = "SLURM_JOB_ID" not in environ or "SLURM_JOB_NODELIST" not in environ
    if not outside and spec.array is None:
        return
    is_going = (record := read_run_record(run)).job_id is not None and record.finished is None
    going = f" The run may still be active as job {record.job_id}." if is_going else ""
    if outside:
        raise NotInJob(
            f"{script} is a Slurm job script, but this process is not in a Slurm job (SLURM_JOB_ID or "
            f"SLURM_JOB_NODELIST is not set).{going} To start the run manually, submit the script: "
            f"sbatch {script}"
        )
    raise NotInJob(
        f"{script} is the script of a job array ({spec.array}), but this job is not a task of the array "
        f"(SLURM_ARRAY_TASK_ID is {environ.get('SLURM_ARRAY_TASK_ID', 'not set')}).{going} To start the run "
        f"manually, submit the script: sbatch {script}"
    )


def run_of_this_job(run: RunDir, environ: Mapping[str, str]) -> RunDir:
    """Return the run of this job; in a job array under Slurm, a task of the array."""
    task = run.task(environ.get("SLURM_ARRAY_TASK_ID", ""))
    return task if task.spec.exists() else run


def acquire_run(run: RunDir, spec: JobSpec, job_control: JobControl, deaths: int = 0) -> Continue | Exit:
    """Decide whether this job must train. If so, record this job as the newest job of the run.

    Args:
        run: the run.
        spec: its job specification.
        job_control: control of this job. It holds the lease from now on if this job must train.
        deaths: number of earlier supervisors of this job that were killed.

    Returns:
        `Exit` if this job has nothing to do: the run is over, or another job continues it.

    Raises:
        NotInJob: the script was started manually, and the run is active or was cancelled afterwards.
    """
    state = _ownership_state(run, job_control, deaths)
    decision = decide_ownership(state)
    log.info("job %s: %s (%s)", job_control.job_id, decision.value, state)
    match decision:
        case OwnershipDecision.SUPERSEDED:
            return Exit(0)
        case OwnershipDecision.OVER if state.predecessor is not None or state.newest == state.job_id:
            if state.ended == "FAILED":
                _print_failed(run)
            return Exit(_exit_code(run))
        case OwnershipDecision.CANCEL:
            return finish_run(run, "CANCELLED")
    lease_error = None
    if job_control.successors is not None:
        lease_error = _lock_run_folder(run, job_control.successors, deaths)
    if state.predecessor is None:
        return register_job(run, spec, job_control.job_id, job_control.successors, lease_error)
    if recorded_end(run.read_events()) is not None:
        # The previous holder of the lease ended the run in the meantime.
        return Exit(_exit_code(run))
    if state.newest != job_control.job_id:
        # The predecessor was killed before it could record this job.
        record_successor(run, job_control.job_id, state.predecessor)
    return Continue()


def _exit_code(run: RunDir) -> int:
    """Return the exit code of an ended run."""
    return int((recorded_end(run.read_events()) or {}).get("exit_code", 0))


def _ownership_state(run: RunDir, job_control: JobControl, deaths: int) -> OwnershipState:
    end, record = recorded_end(run.read_events()), read_run_record(run)
    jobs = job_control.successors
    predecessor = jobs.predecessor if jobs is not None else None
    return OwnershipState(
        job_control.job_id,
        newest=record.job_id,
        newest_after=(record.submitted or {}).get("after"),
        ended=(end or {}).get("state"),
        cancelled=run.cancel_request.exists(),
        predecessor=predecessor,
        claimed_by=claim_successor(run, job_control.job_id, predecessor) if predecessor else None,
        successor=_successor(run, record, job_control),
        is_automatic=deaths > 0 or jobs is not None,
    )


def recorded_end(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the end of the run since the user's last submission; None if ranks were started afterwards.

    A successor may be recorded after the end: the supervisor of a killed batch script submits it in a thread.
    """
    end: dict[str, Any] | None = None
    for event in events:
        if event["kind"] == "finished":
            end = event
        elif event["kind"] == "started" or is_new_submission(event):
            end = None
    return end


def _lock_run_folder(run: RunDir, jobs: SuccessorJobs, deaths: int) -> OSError | None:
    """Acquire the lease of the run folder, so that no other process trains in this folder.

    Returns:
        The error if the folder cannot be written: a full disk must not prevent training.
    """
    try:
        jobs.lease.acquire(jobs.predecessor, deaths)
    except LeaseHeld as taken:
        it = taken.holder
        raise RunActive(
            f"The run in {str(run.path)!r} is still active as job {it.job_id}: its supervisor (process "
            f"{it.pid} on {it.host}) holds the lease on the folder. Wait for the run to end, or cancel it."
        ) from None
    except OSError as error:
        log.warning(
            "cannot acquire the lease on the run folder, so a second job could train in it: %s", error
        )
        return error
    return None


def _successor(run: RunDir, record: RunRecord, job_control: JobControl) -> str | None:
    """Return the successor of this job, if Slurm requeued this job after submitting it."""
    job_id = job_control.job_id
    if (recorded := recorded_successor(run.read_events(), job_id)) is not None:
        return recorded
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


def recorded_successor(events: Iterable[Mapping[str, Any]], job_id: str) -> str | None:
    """Return the first recorded successor of a job."""
    found = (each["job_id"] for each in events if each["kind"] == "submitted" and each.get("after") == job_id)
    return next(map(str, found), None)


def register_job(
    run: RunDir,
    spec: JobSpec,
    job_id: str,
    jobs: SuccessorJobs | None = None,
    lease_error: OSError | None = None,
) -> Continue | Exit:
    """Record this job as the newest job of the run, so that later events belong to this job.

    The submission precedes other events in the record, although the job may start before `hpctrain submit`
    records the submission. A manual start of the job script is recorded by this function.

    Args:
        run: the run.
        spec: its job specification.
        job_id: this job.
        jobs: the other jobs of the run; None if the run's lock is sufficient.
        lease_error: the error that prevented this job from acquiring the lease. Only the recorded job may
            train without a lease.

    Returns:
        `Exit` if the run is complete: Slurm may requeue a job that has just ended, and a job that was
        submitted manually may start after the run has completed.

    Raises:
        NotInJob: the script was started manually, and the run is active or was cancelled afterwards.
    """
    deadline, pause_s = system.monotonic() + _RECORD_LIMIT_S, 0.02
    while (
        events := events_since_submission(run.read_events(), job_id)
    ) is None and system.monotonic() < deadline:
        system.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
    if events is None:
        if spec.backend == "local":
            _take_lock(run)
        elif jobs is not None:
            _refuse_second(run, jobs)
            if _ended_while_queued(run, job_id, jobs):
                return Exit(_exit_code(run))
            if lease_error is not None:
                raise NotInJob(
                    f"Job {job_id} was submitted manually, and cannot acquire the lease on the run folder: "
                    f"{lease_error}. Without the lease, a second job could train in the folder. Submit the "
                    "script again when the folder can be written."
                )
        record_manual_submission(run, spec, job_id)
        return Continue()
    ends = [event for event in events if event["kind"] == "finished"]
    if not ends:
        return Continue()
    if ends[-1]["state"] in ("COMPLETED", STOPPED_EARLY):
        return Exit(int(ends[-1].get("exit_code", 0)))
    # The user restarts a run that has ended.
    record_manual_submission(run, spec, job_id)
    return Continue()


def events_since_submission(recorded: Iterable[dict[str, Any]], job_id: str) -> list[dict[str, Any]] | None:
    """Return the events since this job was submitted; None if its submission is not recorded."""
    events: list[dict[str, Any]] | None = None
    for event in recorded:
        if event["kind"] == "submitted":
            events = [] if event["job_id"] == job_id else None
        elif events is not None:
            events.append(event)
    return events


def record_manual_submission(run: RunDir, spec: JobSpec, job_id: str) -> None:
    """Record a submission without `hpctrain submit`, and withdraw any request to cancel the run."""
    for part in (run, *map(run.task, run.tasks())):
        part.cancel_request.unlink(missing_ok=True)
    run.log_event(
        "submitted", max(run.attempts(), default=-1) + 1, job_id=job_id, backend=spec.backend, by_hand=True
    )


def _refuse_second(run: RunDir, jobs: SuccessorJobs) -> None:
    """Check that no other job trains in the folder: the newest recorded job may be running."""
    record = read_run_record(run)
    if record.job_id is None or record.finished is not None:
        return
    try:
        if not jobs.is_running(record.job_id):
            return
    except SchedulerError as error:
        raise RunActive(
            f"Cannot determine whether job {record.job_id} of the run in {str(run.path)!r} is still active: "
            f"{error}. Submit the script again when Slurm responds."
        ) from error
    raise RunActive(
        f"The run in {str(run.path)!r} is still active as job {record.job_id}. Wait for the run to "
        "end, or cancel it."
    )


def _ended_while_queued(run: RunDir, job_id: str, jobs: SuccessorJobs) -> bool:
    """Return true if the run completed while this job waited in the queue, or failed in another recorded job.

    A cancellation applies to jobs submitted earlier; a run that failed continues in a manually submitted job.

    Raises:
        NotInJob: the run was cancelled in that time.
    """
    finished = read_run_record(run).finished or _unrecorded_cancellation(run)
    recorded = [event for event in run.read_events() if event["kind"] == "submitted"]
    submitted = next((float(event["time"]) for event in recorded if event["job_id"] == job_id), None)
    match finished.get("state"):
        case "COMPLETED" | "CANCELLED":
            submitted = jobs.submitted_at() if submitted is None else submitted
        case "FAILED" if submitted is not None:
            _print_failed(run)
            return True
        case _:
            return False
    # Slurm truncates the submission time to seconds; the run may have ended earlier in that second.
    if submitted is None or submitted + 1.0 > float(finished["time"]):
        return False
    if finished["state"] == "CANCELLED":
        raise NotInJob(
            f"The run in {str(run.path)!r} was cancelled after job {job_id} was submitted manually, so this "
            "job exits. To continue the run, submit the script again."
        )
    print(f"The run completed after job {job_id} was submitted, so this job exits.")
    return True


def _print_failed(run: RunDir) -> None:
    print(
        "The run has failed, so this job exits. To continue the run, use "
        f"hpctrain resume {shlex.quote(str(run.path))}"
    )


def _unrecorded_cancellation(run: RunDir) -> dict[str, Any]:
    """Return the end of a run whose supervisor was killed before it could record the cancellation."""
    try:
        return {"state": "CANCELLED", "time": run.cancel_request.stat().st_mtime}
    except OSError:
        return {}


def _take_lock(run: RunDir) -> None:
    """Hold the run's lock until this process exits. Submitted supervisors inherit the lock."""
    lock = try_lock(run.lock)
    if lock is None:
        raise RunActive(
            f"The run in {str(run.path)!r} is still active. Wait for the run to end, or cancel it."
        )
    with suppress(OSError):  # On a full disk, the lock file lacks only the owner's pid.
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{system.getpid()}\n".encode(), 0)
