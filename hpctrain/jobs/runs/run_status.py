"""Status of a run, from the run record first and the scheduler's answer second."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.format.manifest import committed_steps
from hpctrain.checkpoint.script_checkpoints import newest_script_checkpoint
from hpctrain.files import warn_once
from hpctrain.records.checkpoint_health import save_problem
from hpctrain.records.log_tail import read_last_records
from hpctrain.records.run_record import RunRecord, read_run_record
from hpctrain.rundir import RunDir, is_metrics
from hpctrain.slurm.pending_reasons import DEPENDENCY_NEVER_SATISFIED
from hpctrain.slurm.states import JobStateView, RunState, combine_states, count_states, describe_counts
from hpctrain.telemetry.accounting.metric_fields import reports_steps
from hpctrain.text import pluralize

#: Records of metrics.jsonl to search for a loss: validation may write records without one.
_RECORDS_SEARCHED = 100


@dataclass(frozen=True)
class RunStatus:
    """Status of a run at one time."""

    run_id: str
    run_dir: str
    state: RunState
    #: Details from the scheduler beyond the state, if it was queried.
    words: str
    #: True if the job waits only for the end of Slurm's requeue delay.
    held: bool = False
    job_id: str | None = None
    backend: str | None = None
    #: Name of the job state in the scheduler, such as TIMEOUT, if reported.
    job_state: str | None = None
    #: Seconds since the last sign of activity, if the state is UNKNOWN.
    unknown_s: float | None = None
    #: Number of the newest attempt; None before the first attempt.
    attempt: int | None = None
    #: Number of nodes of that attempt; in an elastic run it may change with each attempt.
    nodes: int | None = None
    step: int | None = None
    loss: float | None = None
    #: True if the script reports its steps; None if unknown.
    reports_steps: bool | None = None
    #: Folder of the newest complete checkpoint, or the newest entry of `checkpoints` that the script wrote.
    checkpoint: str | None = None
    #: Time and reason of the failed save, if a running run cannot save.
    not_saved: str | None = None
    #: True if Slurm reports that the job's dependency can never be satisfied.
    never_starts: bool = False
    #: Remark on an unusual end of the run.
    note: str | None = None
    #: Cause of the failure; `log` is the log that shows it.
    cause: str | None = None
    log: str | None = None
    #: Time of the last submission, in seconds since the epoch.
    submitted: float | None = None
    #: Number of tasks of a job array by state; None for a single run.
    tasks: Mapping[str, int] | None = None


def derive_status(record: RunRecord, view: JobStateView | None, last_known: float = 0.0) -> RunStatus:
    run = record.run
    if record.finished is None and view is not None and view.state.ended:
        # The run may have recorded its end between the two queries.
        record = read_run_record(run)
    cause: str | None = None
    log: str | None = None
    explanation = view.words if view else ""
    if record.finished is not None:
        state, view, explanation = _finished_state(record.finished), None, ""
    elif view is None:
        state = RunState.UNKNOWN
        explanation = "the run record contains no job id, so the run was never submitted"
    elif view.state.ended and run.cancel_request.exists():
        state = RunState.STOPPED_EARLY if run.early_stop_reason() else RunState.CANCELLED
    elif view.state is RunState.COMPLETED:
        # A completed run records its completion: this run was stopped before that.
        state = RunState.FAILED
    else:
        state = view.state
    if state is RunState.FAILED:
        cause, log = _cause(record, _describe_end(record, view))
    held = view is not None and view.held and state is RunState.PENDING
    if held:
        explanation += f"; use `hpctrain requeue {run.run_id}` to end the delay"
    metrics = _last_metrics(run.metrics)
    attempt = max(run.attempts(), default=None)
    return RunStatus(
        run_id=run.run_id,
        run_dir=str(run.path),
        state=state,
        words=explanation,
        held=held,
        job_id=record.job_id,
        backend=record.backend,
        job_state=view.job_state if view is not None else None,
        never_starts=state is RunState.PENDING and DEPENDENCY_NEVER_SATISFIED in explanation,
        unknown_s=_unknown_s(record, last_known) if state is RunState.UNKNOWN else None,
        attempt=attempt,
        nodes=record.started.get("nodes") if record.started else None,
        step=metrics.get("step"),
        loss=metrics.get("loss"),
        reports_steps=reports_steps(run, has_steps="step" in metrics, completed=state is RunState.COMPLETED),
        checkpoint=_newest_checkpoint(run),
        not_saved=save_problem(run) if state is RunState.RUNNING else None,
        note=(record.finished or {}).get("note"),
        cause=cause,
        log=log,
        submitted=record.submitted["time"] if record.submitted else None,
    )


def summarize_array(record: RunRecord, tasks: Sequence[RunStatus]) -> RunStatus:
    counts = count_states(task.state for task in tasks)
    failed = next((task for task in tasks if task.state is RunState.FAILED), None)
    state = combine_states(task.state for task in tasks)
    unknown_s = max((task.unknown_s or 0.0 for task in tasks), default=0.0)
    return RunStatus(
        run_id=record.run.run_id,
        run_dir=str(record.run.path),
        state=state,
        words=f"{pluralize(len(tasks), 'task')}: {describe_counts(counts)}",
        held=any(task.held for task in tasks),
        job_id=record.job_id,
        backend=record.backend,
        unknown_s=unknown_s if state is RunState.UNKNOWN else None,
        cause=f"{failed.run_id}: {failed.cause}" if failed else None,
        log=failed.log if failed else None,
        submitted=record.submitted["time"] if record.submitted else None,
        never_starts=state is RunState.PENDING
        and all(task.never_starts or task.state.ended for task in tasks),
        tasks=counts,
    )


def _unknown_s(record: RunRecord, last_known: float) -> float | None:
    known_at = max(last_known, record.run.last_activity()) if record.submitted else 0.0
    return max(0.0, time.time() - known_at) if known_at else None


def _finished_state(finished: dict[str, Any]) -> RunState:
    try:
        return RunState(finished.get("state", ""))
    except ValueError:
        return RunState.UNKNOWN


def _describe_end(record: RunRecord, view: JobStateView | None) -> str:
    """Describe the end of a job whose supervisor recorded no cause, from the scheduler's answer."""
    if view is None or record.backend != "slurm" or view.job_state is None:
        return view.words if view else ""
    if record.started is not None:
        odd = ", but the run is not complete: its supervisor exited without reporting a result"
        return view.words + (odd if view.job_state == "COMPLETED" else "")
    if view.job_state == "COMPLETED":
        return (
            f"{view.words}, but its batch script exited before any rank started; look for an `exit` in "
            "--setup and in the files that it sources"
        )
    return f"{view.words} before any rank started"


def _cause(record: RunRecord, explanation: str) -> tuple[str, str]:
    """Return the cause of the failure from the best available source, and the log to read."""
    finished, failure = record.finished or {}, record.failure or {}
    cause = finished.get("cause") or failure.get("cause") or explanation or "the run recorded no cause"
    log = failure.get("log") or str(record.run.slurm_log if not finished else record.run.supervisor_log)
    return str(cause), str(log)


def _last_metrics(path: Path) -> dict[str, Any]:
    """Return the step of the last record, and the last loss."""
    summary: dict[str, Any] = {}
    try:
        for number, record in enumerate(read_last_records(path, is_metrics)):
            if "step" in record:
                summary.setdefault("step", record["step"])
            if _is_loss(record.get("loss")):
                summary.setdefault("loss", record["loss"])
            if len(summary) == 2 or number >= _RECORDS_SEARCHED:
                break
    except OSError as error:
        warn_once(f"Cannot read {path}: {error.strerror}.")
    return summary


def _is_loss(value: object) -> bool:
    """True for any float, infinity and nan included, and for integers that fit into a float."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def _newest_checkpoint(run: RunDir) -> str | None:
    if (step := next(committed_steps(run.checkpoints), None)) is not None:
        return str(run.checkpoint(step))
    newest = newest_script_checkpoint(run.checkpoints)
    return None if newest is None else str(newest[0])
