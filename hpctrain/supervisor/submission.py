"""What the record says of this job before its supervisor starts: who submitted it, and whether it is over."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from hpctrain.errors import SpecError
from hpctrain.files import end_torn_line, try_lock
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir

#: `hpctrain submit` records a job within milliseconds of its submission.
_RECORD_LIMIT_S = 10.0


def own_run(run: RunDir, environ: Mapping[str, str]) -> RunDir:
    """The run that this job is: of a job array under Slurm, one of its tasks."""
    task = run.task(environ.get("SLURM_ARRAY_TASK_ID", ""))
    return task if task.spec.exists() else run


def join_record(run: RunDir, spec: JobSpec, job_id: str) -> int | None:
    """Make this job the newest one of the run's record, so that all that follows is told of it.

    The submission comes first in the record, though the job may start before `hpctrain submit` has written
    it. A job script that was started by hand is recorded here.

    Returns:
        The exit code, where the run is complete: Slurm may requeue a job that has just ended.

    Raises:
        SpecError: the script was started by hand while the run is going on.
    """
    end_torn_line(run.events)
    deadline = time.monotonic() + _RECORD_LIMIT_S
    while (events := _since_submission(run, job_id)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if events is None:
        if spec.backend == "local":
            _take_lock(run)
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
    """Record a submission that was none of `hpctrain submit`."""
    run.log_event(
        "submitted", max(run.attempts(), default=-1) + 1, job_id=job_id, backend=spec.backend, by_hand=True
    )


def _take_lock(run: RunDir) -> None:
    """Hold the run's lock for the life of this process, as a submission's supervisor inherits it."""
    lock = try_lock(run.lock)
    if lock is None:
        raise SpecError(f"The run in {str(run.path)!r} is still going. Wait for it, or cancel it.")
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
