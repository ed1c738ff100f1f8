"""Determine the status of runs, from their records first and from the answers of schedulers second."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hpctrain.checkpoint.format.manifest import committed_steps
from hpctrain.checkpoint.listing import describe_unmatched, newest_script_checkpoint
from hpctrain.errors import SpecError
from hpctrain.files import read_regular, warn_once
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.record_types import Event, StepRecord
from hpctrain.records.checkpoint_health import save_problem
from hpctrain.records.log_tail import read_last_records
from hpctrain.records.run_record import RunRecord, read_run_record
from hpctrain.rundir import RunDir
from hpctrain.slurm.pending_reasons import DEPENDENCY_NEVER_SATISFIED
from hpctrain.slurm.states import JobStateView, RunState, combine_states, count_states, describe_counts
from hpctrain.telemetry.report.metric_curves import reports_steps
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

    @property
    def dir(self) -> RunDir:
        return RunDir(Path(self.run_dir))


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
    step, loss = _last_step_and_loss(run.metrics)
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
        nodes=record.started.nodes if record.started else None,
        step=step,
        loss=loss,
        reports_steps=reports_steps(run, has_steps=step is not None, completed=state is RunState.COMPLETED),
        checkpoint=_newest_checkpoint(run),
        not_saved=save_problem(run) if state is RunState.RUNNING else None,
        note=record.finished.note if record.finished else None,
        cause=cause,
        log=log,
        submitted=record.submitted.time if record.submitted else None,
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
        submitted=record.submitted.time if record.submitted else None,
        never_starts=state is RunState.PENDING
        and all(task.never_starts or task.state.ended for task in tasks),
        tasks=counts,
    )


def _unknown_s(record: RunRecord, last_known: float) -> float | None:
    known_at = max(last_known, record.run.last_activity()) if record.submitted else 0.0
    return max(0.0, time.time() - known_at) if known_at else None


def _finished_state(finished: Event) -> RunState:
    try:
        return RunState(str(finished.state))
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
    if record.run.slurm_log.exists():
        return f"{view.words} before any rank started"
    return (
        f"{view.words} before any rank started, and without any output. Either the folder of --output does "
        "not exist or is not writable on the first node, or the node has a problem: "
        f"scontrol show job {record.job_id}"
    )


def _cause(record: RunRecord, explanation: str) -> tuple[str, str | None]:
    """Return the cause of the failure from the best available source, and the log to read, if any."""
    finished, failure = record.finished, record.failure
    causes = [event.cause for event in (finished, failure) if event is not None]
    cause = next(filter(None, [*causes, explanation]), "the run recorded no cause")
    log = failure.log if failure is not None else None
    if log is None and finished is not None:
        log = str(record.run.supervisor_log)
    elif log is None and (record.started is not None or record.run.slurm_log.exists()):
        log = str(record.run.slurm_log)
    return cause, log


def _last_step_and_loss(path: Path) -> tuple[int | None, float | None]:
    step = None
    try:
        for record in islice(read_last_records(path, StepRecord), _RECORDS_SEARCHED):
            step = record.step if step is None else step
            if _is_loss(loss := record.metrics.get("loss")):
                return step, loss
    except OSError as error:
        warn_once(f"Cannot read {path}: {error.strerror}.")
    return step, None


def _is_loss(value: object) -> bool:
    """True for any float, infinity and nan included, and for integers that fit into a float."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def _newest_checkpoint(run: RunDir) -> str | None:
    if (step := next(committed_steps(run.checkpoints), None)) is not None:
        return str(run.checkpoint(step))
    newest = newest_script_checkpoint(run.checkpoints, checkpoint_pattern(run))
    return None if newest is None else str(newest[0])


def checkpoint_pattern(run: RunDir) -> str | None:
    with suppress(OSError, SpecError):
        # Parsing YAML is slow.
        if b"\ncheckpoints: null\n" not in read_regular(run.spec):
            return load_spec(run.spec).checkpoints
    return None


def unmatched_pattern(run: RunDir) -> str | None:
    """Return a message if no file has matched the pattern of `--checkpoints`."""
    if (problem := describe_unmatched(checkpoint_pattern(run))) is None:
        return None
    # Files that it has matched may be on the local disk of a node, or deleted.
    saved = [event.path for event in run.read_events() if event.kind == "checkpoint" and event.step is None]
    return None if any(path and not Path(path).is_relative_to(run.checkpoints) for path in saved) else problem
