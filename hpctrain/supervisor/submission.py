"""What the record says of this job before its supervisor starts: who submitted it, and whether it is over."""

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
from hpctrain.jobs.chain import claim_succession, record_successor
from hpctrain.jobs.lease import Taken
from hpctrain.jobs.record import Record, read_record
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.supervisor.entry import Entry, Standing, enter
from hpctrain.supervisor.scheduler import Scheduler

log = logging.getLogger(__name__)

#: `hpctrain submit` records a job within milliseconds of its submission.
_RECORD_LIMIT_S = 10.0


class NoPart(SpecError):
    """This process has no part in the run, nor in its record: somebody started the job's script by hand."""


class StillGoing(NoPart):
    """Another job of the run is going on."""


def check_place(run: RunDir, spec: JobSpec, environ: Mapping[str, str]) -> None:
    """See to it that the script of a Slurm job runs in one.

    Raises:
        NoPart: it does not, or it is that of a job array and runs in no task.
    """
    if spec.backend != "slurm":
        return
    script = shlex.quote(str((run.array or run).job_script))
    outside = "SLURM_JOB_ID" not in environ or "SLURM_JOB_NODELIST" not in environ
    if not outside and spec.array is None:
        return
    is_going = (record := read_record(run)).job_id is not None and record.finished is None
    going = f" The run may still be going, as job {record.job_id}." if is_going else ""
    if outside:
        raise NoPart(
            f"{script} is the script of a Slurm job, and this process is in none (SLURM_JOB_ID and "
            f"SLURM_JOB_NODELIST are not both set).{going} To start the run by hand: sbatch {script}"
        )
    raise NoPart(
        f"{script} is the script of a job array, {spec.array}, and this job is no task of it "
        f"(SLURM_ARRAY_TASK_ID is {environ.get('SLURM_ARRAY_TASK_ID', 'not set')}).{going} "
        f"To start the run by hand: sbatch {script}"
    )


def own_run(run: RunDir, environ: Mapping[str, str]) -> RunDir:
    """The run that this job is: of a job array under Slurm, one of its tasks."""
    task = run.task(environ.get("SLURM_ARRAY_TASK_ID", ""))
    return task if task.spec.exists() else run


def take_turn(run: RunDir, spec: JobSpec, scheduler: Scheduler, deaths: int = 0) -> int | None:
    """Find out whether it is for this job to train, and make it the newest one of the run's record.

    Args:
        run: the run.
        spec: of the run.
        scheduler: of this job. Its lease is held from now on where this job is to train.
        deaths: how many supervisors of this job were killed before.

    Returns:
        The exit code, where nothing is left to do: the run is over, or another job continues it.

    Raises:
        NoPart: the script was started by hand while the run is going on, or before it was cancelled.
    """
    job_id, predecessor = scheduler.job_id, scheduler.predecessor
    record = read_record(run)
    finished = record.finished or {}
    standing = Standing(
        job_id,
        newest=record.job_id,
        ended=finished.get("state"),
        cancelled=run.cancel_request.exists(),
        predecessor=predecessor,
        heir=claim_succession(run, job_id, predecessor) if predecessor else None,
        successor=_successor(run, record, scheduler),
    )
    entry = enter(standing)
    log.info("job %s: %s; %s", job_id, entry.value, standing)
    match entry:
        case Entry.SUPERSEDED:
            return 0
        case Entry.OVER if predecessor:
            return int(finished["exit_code"])
        case Entry.CANCEL:
            run.log_event(
                "finished", max(run.attempts(), default=0), state="CANCELLED", exit_code=0, cause=None
            )
            return 0
        case _ if predecessor:
            _hold(run, scheduler, deaths)
            if record.job_id != job_id:
                # Its predecessor was killed before it could write this down.
                record_successor(run, job_id, predecessor)
            return None
        case _:
            _hold(run, scheduler, deaths)
            return join_record(run, spec, job_id, scheduler.is_running, scheduler.submitted_at)


def _hold(run: RunDir, scheduler: Scheduler, deaths: int) -> None:
    """Hold the folder: whatever the record says, no other process is to train there now."""
    if scheduler.lease is None:
        return
    try:
        scheduler.lease.take(scheduler.predecessor, deaths)
    except Taken as taken:
        it = taken.holder
        raise StillGoing(
            f"The run in {str(run.path)!r} is still going, as job {it.job_id}: its supervisor on {it.host}, "
            f"process {it.pid}, holds the folder. Wait for it, or cancel it."
        ) from None
    except OSError as error:
        # A disk that is full keeps nobody from training.
        log.warning("the run's folder cannot be held: %s", error)


def _successor(run: RunDir, record: Record, scheduler: Scheduler) -> str | None:
    """The job that was to continue this one, where Slurm has requeued this one afterwards."""
    job_id = scheduler.job_id
    for event in run.read_events():
        if event["kind"] == "submitted" and event.get("after") == job_id:
            return str(event["job_id"])
    if record.job_id != job_id or record.handover is None:
        return None
    try:
        successor = scheduler.find_successor()
    except SchedulerError as error:
        # If there is one, it waits for the end of this job, and finds the run over then.
        log.warning("whether job %s has a successor cannot be told: %s", job_id, error)
        return None
    if successor is not None:
        record_successor(run, successor, job_id)
    return successor


def join_record(
    run: RunDir,
    spec: JobSpec,
    job_id: str,
    is_running: Callable[[str], bool] | None = None,
    submitted_at: Callable[[], float | None] | None = None,
) -> int | None:
    """Make this job the newest one of the run's record, so that all that follows is told of it.

    The submission comes first in the record, though the job may start before `hpctrain submit` has written
    it. A job script that was started by hand is recorded here.

    Args:
        run: the run.
        spec: of the run.
        job_id: this job.
        is_running: see `Scheduler.is_running`; None where the run's lock tells all.
        submitted_at: see `Scheduler.submitted_at`; None where a job starts when it is submitted.

    Returns:
        The exit code, where the run is complete: Slurm may requeue a job that has just ended, and one that
        was submitted by hand may have waited for that.

    Raises:
        NoPart: the script was started by hand while the run is going on, or before it was cancelled.
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
        record_by_hand(run, spec, job_id)
        return None
    ends = [event for event in events if event["kind"] == "finished"]
    if not ends:
        return None
    if ends[-1]["state"] == "COMPLETED":
        return int(ends[-1]["exit_code"])
    # Somebody wants an ended run to go on.
    record_by_hand(run, spec, job_id)
    return None


def _since_submission(run: RunDir, job_id: str) -> list[dict[str, Any]] | None:
    """What was recorded since this job was submitted; None where its submission is not recorded."""
    events: list[dict[str, Any]] | None = None
    for event in run.read_events():
        if event["kind"] == "submitted":
            events = [] if event["job_id"] == job_id else None
        elif events is not None:
            events.append(event)
    return events


def record_by_hand(run: RunDir, spec: JobSpec, job_id: str) -> None:
    """Record a submission that was none of `hpctrain submit`; it takes back a wish to cancel the run."""
    for part in (run, *map(run.task, run.tasks())):
        part.cancel_request.unlink(missing_ok=True)
    run.log_event(
        "submitted", max(run.attempts(), default=-1) + 1, job_id=job_id, backend=spec.backend, by_hand=True
    )


def _refuse_second(run: RunDir, is_running: Callable[[str], bool]) -> None:
    """See to it that no other job trains in the folder: the newest one of the record has begun, or will."""
    record = read_record(run)
    if record.job_id is None or record.finished is not None:
        return
    try:
        if not is_running(record.job_id):
            return
    except SchedulerError as error:
        raise StillGoing(
            f"Whether job {record.job_id} of the run in {str(run.path)!r} is still going cannot be told: "
            f"{error}. Start the script again when Slurm answers."
        ) from error
    raise StillGoing(
        f"The run in {str(run.path)!r} is still going, as job {record.job_id}. Wait for it, or cancel it."
    )


def _ended_meanwhile(run: RunDir, job_id: str, submitted_at: Callable[[], float | None]) -> int | None:
    """The exit code of a job that waited in the queue until the run was complete.

    Whoever cancels a run means what he has asked for by then; a run that failed meanwhile goes on.

    Raises:
        NoPart: the run was cancelled in that time.
    """
    finished = read_record(run).finished or _cancelled_unheard(run)
    if finished.get("state") not in ("COMPLETED", "CANCELLED") or (submitted := submitted_at()) is None:
        return None
    # Slurm tells the second, in which the run may have ended before.
    if submitted + 1.0 > float(finished["time"]):
        return None
    if finished["state"] == "COMPLETED":
        print(f"The run is complete since this job was submitted: nothing is left to do for job {job_id}.")
        return int(finished["exit_code"])
    raise NoPart(
        f"The run in {str(run.path)!r} was cancelled after job {job_id} was submitted by hand, which ends "
        "that job, too. Submit it again to have the run go on."
    )


def _cancelled_unheard(run: RunDir) -> dict[str, Any]:
    """The end of a run whose supervisor was killed before it could write down that it was cancelled."""
    try:
        return {"state": "CANCELLED", "time": run.cancel_request.stat().st_mtime}
    except OSError:
        return {}


def _take_lock(run: RunDir) -> None:
    """Hold the run's lock for the life of this process, as a submission's supervisor inherits it."""
    lock = try_lock(run.lock)
    if lock is None:
        raise StillGoing(f"The run in {str(run.path)!r} is still going. Wait for it, or cancel it.")
    with suppress(OSError):  # A full disk: who holds the lock is only said in it.
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
