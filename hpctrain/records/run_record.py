"""Summarize the events of a run: its submission, outcome and last activity, and whether it can save."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from hpctrain.checkpoint.format.manifest import committed_steps
from hpctrain.checkpoint.listing import newest_script_checkpoint
from hpctrain.jobspec.job_spec import BackendName
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import RunDir
from hpctrain.schema import Event
from hpctrain.slurm.states import JobRecord


def save_problem(run: RunDir) -> str | None:
    """Return the reason why checkpoints are missing, and since when; None if no problem is known."""
    try:
        # A full disk cannot record events.
        cause = _last_failure(run) or full_disk(run)
    except OSError as error:
        cause = f"{run.path}: {error.strerror}"
    if cause is None:
        return None
    newest = max(committed_steps(run.checkpoints), default=None)
    if newest is None:
        return f"no checkpoint yet: {cause}"
    since = ""
    with suppress(OSError):
        seconds = run.checkpoint(newest).stat().st_mtime
        since = f" ({datetime.fromtimestamp(seconds).isoformat(' ', 'seconds')})"
    return f"no checkpoint since step {newest}{since}: {cause}"


def starts_over(run: RunDir) -> bool:
    """True if the next attempt of a started run has no checkpoint to resume from."""
    if run.function.exists() or next(committed_steps(run.checkpoints), None) is not None:
        return False
    if newest_script_checkpoint(run.checkpoints) is not None:
        return False
    is_started = False
    for event in run.read_events():
        is_started |= event.kind == "started"
        # A checkpoint may be in the local tier, or a copy of the state in memory.
        if event.kind in ("checkpoint", "memory_copy"):
            return False
    return is_started


def _last_failure(run: RunDir) -> str | None:
    """Return the cause of the last save failure; None if the last save succeeded."""
    for event in read_last_records(run.events, Event):
        match event.kind:
            case "checkpoint" | "submitted":
                return None
            case "failure" if event.rank is None:
                return str(event.cause)
    return None


def full_disk(run: RunDir) -> str | None:
    """Return a message if the run's disk is full, otherwise None."""
    disk = os.statvfs(run.path)
    return f"disk full at {run.path}" if disk.f_blocks and not disk.f_bavail else None


#: Most events of a long run are checkpoints, which are irrelevant to its state.
_IGNORED_EVENTS = b'"kind": "checkpoint"'


@dataclass(frozen=True)
class RunRecord:
    """Events of the run since its last submission."""

    run: RunDir
    submitted: Event | None
    finished: Event | None
    failure: Event | None
    #: The observed end of the job; the scheduler forgets it.
    observed_end: Event | None
    #: The intent to continue the run in a successor job.
    handover: Event | None = None
    #: The newest start of the ranks.
    started: Event | None = None

    @property
    def job(self) -> JobRecord | None:
        """The last submitted job."""
        if self.submitted is None:
            return None
        return JobRecord(
            job_id=str(self.submitted.job_id),
            run=self.run,
            submitted=self.submitted.time,
            observed_state=self.observed_end.job_state if self.observed_end else None,
        )

    @property
    def job_id(self) -> str | None:
        return self.submitted.job_id if self.submitted else None

    @property
    def backend(self) -> BackendName | None:
        if self.submitted is None:
            return None
        return "slurm" if self.submitted.backend == "slurm" else "local"


def read_run_record(run: RunDir) -> RunRecord:
    """Read the events since the last submission.

    An end is ignored if workers were started afterwards. A failure without a rank is also ignored: it is a
    failed checkpoint, after which the run continues.
    """
    return summarize_events(run, read_last_records(run.events, Event, unless=_IGNORED_EVENTS, whole=True))


def summarize_events(run: RunDir, newest_first: Iterable[Event]) -> RunRecord:
    """Return the record of a run from its events. See `read_run_record`."""
    newest: dict[str, Event] = {}
    for event in newest_first:
        is_before_start = "started" in newest and event.kind in ("finished", "failure", "seen", "handover")
        if not is_before_start and (event.kind != "failure" or event.rank is not None):
            newest.setdefault(event.kind, event)
        if event.kind == "submitted":
            break
    submitted = newest.get("submitted")
    for kind in ("seen", "handover"):
        if kind in newest and (submitted is None or newest[kind].job_id != submitted.job_id):
            del newest[kind]  # A late event of the previous job.
    kinds = ("submitted", "finished", "failure", "seen", "handover", "started")
    return RunRecord(run, *map(newest.get, kinds))
