"""Where a run stands: its own record first, then what the scheduler says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.manifest import committed_steps
from hpctrain.jobs.states import JobView, RunState
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
    #: Number of the newest start of the workers; None before the first.
    attempt: int | None
    step: int | None
    loss: float | None
    #: Folder of the newest whole checkpoint.
    checkpoint: str | None
    #: Why the run failed, and the log that shows it.
    cause: str | None
    log: str | None
    #: When the run was last submitted, in seconds since the epoch.
    submitted: float | None


@dataclass(frozen=True)
class Record:
    """What the run itself has written since its last submission."""

    run: RunDir
    submitted: dict[str, Any] | None
    finished: dict[str, Any] | None
    failure: dict[str, Any] | None

    @property
    def job_id(self) -> str | None:
        return str(self.submitted["job_id"]) if self.submitted else None

    @property
    def backend(self) -> str | None:
        return str(self.submitted["backend"]) if self.submitted else None


def read_record(run: RunDir) -> Record:
    """Read the events since the last submission. An end that workers were started after is none."""
    last: dict[str, dict[str, Any]] = {}
    for event in run.read_events():
        if event.get("kind") == "submitted":
            last = {}
        elif event.get("kind") == "started":
            last.pop("finished", None)
        last[str(event.get("kind"))] = event
    return Record(run, last.get("submitted"), last.get("finished"), last.get("failure"))


def settle(record: Record, view: JobView | None) -> RunStatus:
    """Join what the run wrote with what the scheduler says.

    Args:
        record: read before the scheduler was asked.
        view: the scheduler's answer; None where there was nothing to ask.
    """
    run = record.run
    if record.finished is None and view is not None and view.state.ended:
        # The run may have written its end between the two looks.
        record = read_record(run)
    cause: str | None = None
    log: str | None = None
    words = view.words if view else ""
    if record.finished is not None:
        state = _finished_state(record.finished)
        words = ""
    elif view is None:
        state = RunState.UNKNOWN
    elif view.state.ended and run.cancel_request.exists():
        state = RunState.CANCELLED
    elif view.state is RunState.COMPLETED:
        # A run that is complete says so itself: this one was stopped before it could.
        state = RunState.FAILED
    else:
        state = view.state
    if state is RunState.FAILED:
        cause, log = _cause(record, words)
    metrics = _last_metrics(run.metrics)
    return RunStatus(
        run_id=run.path.name,
        run_dir=str(run.path),
        state=state,
        words=words,
        held=view.held if view is not None and state is RunState.PENDING else False,
        job_id=record.job_id,
        backend=record.backend,
        attempt=max(run.attempts(), default=None),
        step=metrics.get("step"),
        loss=metrics.get("loss"),
        checkpoint=_newest_checkpoint(run),
        cause=cause,
        log=log,
        submitted=record.submitted["time"] if record.submitted else None,
    )


def _finished_state(finished: dict[str, Any]) -> RunState:
    try:
        return RunState(finished.get("state", ""))
    except ValueError:
        return RunState.UNKNOWN


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
