"""Where a run stands: its own record first, then what the scheduler says."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.manifest import committed_steps
from hpctrain.jobs.not_saved import why_not_saved
from hpctrain.jobs.reasons import NEVER_STARTS
from hpctrain.jobs.record import Record, last_sign_of_life, read_record
from hpctrain.jobs.states import JobView, RunState, count, describe_counts, overall
from hpctrain.jobs.tail import last_records
from hpctrain.rundir import RunDir

#: Records of metrics.jsonl that are looked at for a loss: validation may write some without one.
_RECORDS_SEARCHED = 100


@dataclass(frozen=True)
class RunStatus:
    """What can be told about a run at one moment."""

    run_id: str
    run_dir: str
    state: RunState
    #: What the scheduler says beyond the state, where it was asked.
    words: str
    #: The job waits only for the delay that Slurm puts on a requeued job.
    held: bool
    job_id: str | None
    backend: str | None
    #: The scheduler's own word for the job's state, such as TIMEOUT, where it was asked and knew one.
    job_state: str | None = None
    #: Seconds since the last moment of which anything is known, where the state is UNKNOWN.
    unknown_s: float | None = None
    #: Number of the newest start of the workers; None before the first.
    attempt: int | None = None
    #: How many nodes that start was given; of an elastic run it may be another number each time.
    nodes: int | None = None
    step: int | None = None
    loss: float | None = None
    #: Folder of the newest whole checkpoint.
    checkpoint: str | None = None
    #: Since when nothing is saved, and why, where a run that is going fails to save.
    not_saved: str | None = None
    #: Slurm says that the job waits for what cannot come any more.
    never_starts: bool = False
    #: Why the run failed, and the log that shows it.
    cause: str | None = None
    log: str | None = None
    #: When the run was last submitted, in seconds since the epoch.
    submitted: float | None = None
    #: How many tasks of a job array are in each state; None for a single run.
    tasks: Mapping[str, int] | None = None


def settle(record: Record, view: JobView | None, last_sure: float = 0.0) -> RunStatus:
    """Join what the run wrote with what the scheduler says.

    Args:
        record: read before the scheduler was asked.
        view: the scheduler's answer; None where there was nothing to ask.
        last_sure: when the scheduler last gave a sure answer about it, in seconds since the epoch.
    """
    run = record.run
    if record.finished is None and view is not None and view.state.ended:
        # The run may have written its end between the two looks.
        record = read_record(run)
    cause: str | None = None
    log: str | None = None
    words = view.words if view else ""
    if record.finished is not None:
        state, view, words = _finished_state(record.finished), None, ""
    elif view is None:
        state, words = RunState.UNKNOWN, "its record names no job: it has not been submitted"
    elif view.state.ended and run.cancel_request.exists():
        state = RunState.CANCELLED
    elif view.state is RunState.COMPLETED:
        # A run that is complete says so itself: this one was stopped before it could.
        state = RunState.FAILED
    else:
        state = view.state
    if state is RunState.FAILED:
        cause, log = _cause(record, _end_in_words(record, view))
    metrics = _last_metrics(run.metrics)
    return RunStatus(
        run_id=run.run_id,
        run_dir=str(run.path),
        state=state,
        words=words,
        held=view.held if view is not None and state is RunState.PENDING else False,
        job_id=record.job_id,
        backend=record.backend,
        job_state=view.job_state if view is not None else None,
        never_starts=state is RunState.PENDING and NEVER_STARTS in words,
        unknown_s=_unknown_s(record, last_sure) if state is RunState.UNKNOWN else None,
        attempt=max(run.attempts(), default=None),
        nodes=record.started.get("nodes") if record.started else None,
        step=metrics.get("step"),
        loss=metrics.get("loss"),
        checkpoint=_newest_checkpoint(run),
        not_saved=why_not_saved(run) if state is RunState.RUNNING else None,
        cause=cause,
        log=log,
        submitted=record.submitted["time"] if record.submitted else None,
    )


def sum_up(record: Record, tasks: Sequence[RunStatus]) -> RunStatus:
    """The status of a job array out of those of its tasks."""
    counts = count(task.state for task in tasks)
    failed = next((task for task in tasks if task.state is RunState.FAILED), None)
    state = overall(task.state for task in tasks)
    return RunStatus(
        run_id=record.run.run_id,
        run_dir=str(record.run.path),
        state=state,
        words=f"{len(tasks)} tasks: {describe_counts(counts)}",
        held=any(task.held for task in tasks),
        job_id=record.job_id,
        backend=record.backend,
        unknown_s=max((task.unknown_s or 0.0 for task in tasks), default=0.0)
        if state is RunState.UNKNOWN
        else None,
        cause=f"{failed.run_id}: {failed.cause}" if failed else None,
        log=failed.log if failed else None,
        submitted=record.submitted["time"] if record.submitted else None,
        never_starts=state is RunState.PENDING and all(it.never_starts or it.state.ended for it in tasks),
        tasks=counts,
    )


def _unknown_s(record: Record, last_sure: float) -> float | None:
    known = max(last_sure, last_sign_of_life(record.run)) if record.submitted else 0.0
    return max(0.0, time.time() - known) if known else None


def _finished_state(finished: dict[str, Any]) -> RunState:
    try:
        return RunState(finished.get("state", ""))
    except ValueError:
        return RunState.UNKNOWN


def _end_in_words(record: Record, view: JobView | None) -> str:
    """What the scheduler says of a job that ended and whose supervisor has not said why."""
    if view is None or record.backend != "slurm" or view.job_state is None:
        return view.words if view else ""
    if record.started is not None:
        odd = ", but the run is not complete: its supervisor ended without a word"
        return view.words + (odd if view.job_state == "COMPLETED" else "")
    if view.job_state == "COMPLETED":
        return (
            f"{view.words}, but its batch script ended before a rank was started: there may be an `exit` in "
            "--setup, or in what that loads"
        )
    return f"{view.words}, before a rank was started"


def _cause(record: Record, words: str) -> tuple[str, str]:
    """Why the run failed, in the words of whoever knows best, and the log to read."""
    finished, failure = record.finished or {}, record.failure or {}
    cause = finished.get("cause") or failure.get("cause") or words or "the run recorded no cause"
    log = failure.get("log") or str(record.run.slurm_log if not finished else record.run.supervisor_log)
    return str(cause), str(log)


def _last_metrics(path: Path) -> dict[str, Any]:
    """Step of the last record, and the last loss before it."""
    found: dict[str, Any] = {}
    for number, record in enumerate(last_records(path)):
        for key in ("step", "loss"):
            if key in record:
                found.setdefault(key, record[key])
        if len(found) == 2 or number >= _RECORDS_SEARCHED:
            break
    return found


def _newest_checkpoint(run: RunDir) -> str | None:
    newest = next(committed_steps(run.checkpoints), None)
    return None if newest is None else str(run.checkpoint(newest))
