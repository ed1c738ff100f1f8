"""Check of the run's record before the supervisor starts: who submitted this job, and is the run over?"""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.files import try_lock
from hpctrain.records.lease import LeaseHeld
from hpctrain.records.run_record import RunRecord, read_run_record
from hpctrain.records.successor import claim_successor, record_successor
from hpctrain.rundir import RunDir
from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor.job_control.base import JobControl
from hpctrain.supervisor.policy.job_ownership import OwnershipDecision, OwnershipState, decide_ownership

log = logging.getLogger(__name__)

#: `hpctrain submit` records a job within milliseconds of its submission.
_RECORD_LIMIT_S = 10.0


class NotInJob(SpecError):
    """This process has no part in the run or its record: the job's script was started by hand."""


class RunActive(NotInJob):
    """Another job of the run is active."""


def check_in_job(run: RunDir, spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Check that the script of a Slurm job runs in such a job.

    Raises:
        NotInJob: it does not, or it is the script of a job array and runs in no task.
    """
    if spec.backend != "slurm":
        return
    script = shlex.quote(str((run.array or run).job_script))
    outside = "SLURM_JOB_ID" not in environ or "SLURM_JOB_NODELIST" not in environ
    if not outside and spec.array is None:
        return
    is_going = (record := read_run_record(run)).job_id is not None and record.finished is None
    going = f" The run may still be active, as job {record.job_id}." if is_going else ""
    if outside:
        raise NotInJob(
            f"{script} is a Slurm job script, but this process is not in a Slurm job (SLURM_JOB_ID and "
            f"SLURM_JOB_NODELIST are not both set).{going} To start the run manually: sbatch {script}"
        )
    raise NotInJob(
        f"{script} is the script of job array {spec.array}, but this job is not one of its tasks "
        f"(SLURM_ARRAY_TASK_ID is {environ.get('SLURM_ARRAY_TASK_ID', 'not set')}).{going} "
        f"To start the run manually: sbatch {script}"
    )


def run_of_this_job(run: RunDir, environ: Mapping[str, str]) -> RunDir:
    """Return the run of this job: in a job array under Slurm, one of its tasks."""
    task = run.task(environ.get("SLURM_ARRAY_TASK_ID", ""))
    return task if task.spec.exists() else run


def acquire_run(run: RunDir, spec: JobSpec, scheduler: JobControl, deaths: int = 0) -> int | None:
    """Decide if this job must train, and if so make it the newest in the run's record.

    Args:
        run: the run.
        spec: its job specification.
        scheduler: control of this job. Its lease is held from now on if this job is to train.
        deaths: number of supervisors of this job that were killed before.

    Returns:
        The exit code if nothing is left to do (the run is over, or another job continues it), else None.

    Raises:
        NotInJob: the script was started by hand while the run is active, or before it was cancelled.
    """
    job_id, predecessor = scheduler.job_id, scheduler.predecessor
    record = read_run_record(run)
    finished = record.finished or {}
    standing = OwnershipState(
        job_id,
        newest=record.job_id,
        ended=finished.get("state"),
        cancelled=run.cancel_request.exists(),
        predecessor=predecessor,
        heir=claim_successor(run, job_id, predecessor) if predecessor else None,
        successor=_successor(run, record, scheduler),
    )
    entry = decide_ownership(standing)
    log.info("job %s: %s; %s", job_id, entry.value, standing)
    match entry:
        case OwnershipDecision.SUPERSEDED:
            return 0
        case OwnershipDecision.OVER if predecessor:
            return int(finished.get("exit_code", 0))
        case OwnershipDecision.CANCEL:
            run.log_event(
                "finished", max(run.attempts(), default=0), state="CANCELLED", exit_code=0, cause=None
            )
            return 0
        case _ if predecessor:
            _hold(run, scheduler, deaths)
            if record.job_id != job_id:
                # The predecessor was killed before it could record this job.
                record_successor(run, job_id, predecessor)
            return None
        case _:
            _hold(run, scheduler, deaths)
            return register_job(run, spec, job_id, scheduler.is_running, scheduler.submitted_at)


def _hold(run: RunDir, scheduler: JobControl, deaths: int) -> None:
    """Hold the run folder, so that no other process trains there, whatever the record contains."""
    if scheduler.lease is None:
        return
    try:
        scheduler.lease.take(scheduler.predecessor, deaths)
    except LeaseHeld as taken:
        it = taken.holder
        raise RunActive(
            f"The run in {str(run.path)!r} is still active, as job {it.job_id}: its supervisor on {it.host}, "
            f"process {it.pid}, holds the lease. Wait for it, or cancel it."
        ) from None
    except OSError as error:
        # A full disk must not prevent training.
        log.warning("cannot acquire the run folder: %s", error)


def _successor(run: RunDir, record: RunRecord, scheduler: JobControl) -> str | None:
    """Return the job that was to continue this one, if Slurm requeued this one afterwards."""
    job_id = scheduler.job_id
    for event in run.read_events():
        if event["kind"] == "submitted" and event.get("after") == job_id:
            return str(event["job_id"])
    if record.job_id != job_id or record.handover is None:
        return None
    try:
        successor = scheduler.find_successor()
    except SchedulerError as error:
        # If a successor exists, it waits for the end of this job and then finds the run over.
        log.warning("cannot determine whether job %s has a successor: %s", job_id, error)
        return None
    if successor is not None:
        record_successor(run, successor, job_id)
    return successor


def register_job(
    run: RunDir,
    spec: JobSpec,
    job_id: str,
    is_running: Callable[[str], bool] | None = None,
    submitted_at: Callable[[], float | None] | None = None,
) -> int | None:
    """Make this job the newest in the run's record, so that later events belong to it.

    The submission comes first in the record, although the job may start before `hpctrain submit` has written
    it. A job script that was started by hand is recorded here.

    Args:
        run: the run.
        spec: its job specification.
        job_id: this job.
        is_running: see `JobControl.is_running`; None if the run's lock is sufficient.
        submitted_at: see `JobControl.submitted_at`; None if a job starts when it is submitted.

    Returns:
        The exit code if the run is complete, else None. Slurm may requeue a job that has just ended, and a
            job
        that was submitted by hand may start after the run has completed.

    Raises:
        NotInJob: the script was started by hand while the run is active, or before it was cancelled.
    """
    deadline = time.monotonic() + _RECORD_LIMIT_S
    while (events := _since_submission(run, job_id)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if events is None:
        if spec.backend == "local":
            _take_lock(run)
        elif is_running is not None:
            _refuse_second(run, is_running)
            if submitted_at is not None and (code := _ended_meanwhile(run, job_id, submitted_at)) is not None:
                return code
        record_manual_submission(run, spec, job_id)
        return None
    ends = [event for event in events if event["kind"] == "finished"]
    if not ends:
        return None
    if ends[-1]["state"] == "COMPLETED":
        return int(ends[-1].get("exit_code", 0))
    # The user restarts a run that has ended.
    record_manual_submission(run, spec, job_id)
    return None


def _since_submission(run: RunDir, job_id: str) -> list[dict[str, Any]] | None:
    """Return the events since this job was submitted; None if its submission is not recorded."""
    events: list[dict[str, Any]] | None = None
    for event in run.read_events():
        if event["kind"] == "submitted":
            events = [] if event["job_id"] == job_id else None
        elif events is not None:
            events.append(event)
    return events


def record_manual_submission(run: RunDir, spec: JobSpec, job_id: str) -> None:
    """Record a submission by hand, without `hpctrain submit`; it withdraws any request to cancel the run."""
    for part in (run, *map(run.task, run.tasks())):
        part.cancel_request.unlink(missing_ok=True)
    run.log_event(
        "submitted", max(run.attempts(), default=-1) + 1, job_id=job_id, backend=spec.backend, by_hand=True
    )


def _refuse_second(run: RunDir, is_running: Callable[[str], bool]) -> None:
    """Check that no other job trains in the folder: the newest on record may be running."""
    record = read_run_record(run)
    if record.job_id is None or record.finished is not None:
        return
    try:
        if not is_running(record.job_id):
            return
    except SchedulerError as error:
        raise RunActive(
            f"Cannot determine whether job {record.job_id} of the run in {str(run.path)!r} is still active: "
            f"{error}. Start the script again when Slurm responds."
        ) from error
    raise RunActive(
        f"The run in {str(run.path)!r} is still active, as job {record.job_id}. Wait for it, or cancel it."
    )


def _ended_meanwhile(run: RunDir, job_id: str, submitted_at: Callable[[], float | None]) -> int | None:
    """Return the exit code of a job that waited in the queue until the run was complete.

    A cancellation applies to jobs submitted before it; a run that failed in that time continues.

    Raises:
        NotInJob: the run was cancelled in that time.
    """
    finished = read_run_record(run).finished or _cancelled_unheard(run)
    if finished.get("state") not in ("COMPLETED", "CANCELLED") or (submitted := submitted_at()) is None:
        return None
    # Slurm truncates the submission time to seconds; the run may have ended earlier in that second.
    if submitted + 1.0 > float(finished["time"]):
        return None
    if finished["state"] == "COMPLETED":
        print(f"The run has completed since job {job_id} was submitted; the job has nothing left to do.")
        return int(finished.get("exit_code", 0))
    raise NotInJob(
        f"The run in {str(run.path)!r} was cancelled after job {job_id} was submitted manually, which ends "
        "that job too. Submit it again to continue the run."
    )


def _cancelled_unheard(run: RunDir) -> dict[str, Any]:
    """Return the end of a run whose supervisor was killed before it could record the cancellation."""
    try:
        return {"state": "CANCELLED", "time": run.cancel_request.stat().st_mtime}
    except OSError:
        return {}


def _take_lock(run: RunDir) -> None:
    """Hold the run's lock for the life of this process, as a submitted supervisor inherits it."""
    lock = try_lock(run.lock)
    if lock is None:
        raise RunActive(f"The run in {str(run.path)!r} is still active. Wait for it, or cancel it.")
    with suppress(OSError):  # On a full disk, the lock only lacks its owner's pid.
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
