"""Summarize the events of a run: its submission, outcome, and last activity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpctrain.jobspec.job_spec import BackendName
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import RunDir, is_event
from hpctrain.slurm.states import JobRecord

#: Most events of a long run are checkpoints, which are irrelevant to its state.
_IGNORED_EVENTS = b'"kind": "checkpoint"'


@dataclass(frozen=True)
class RunRecord:
    """Events of the run since its last submission."""

    run: RunDir
    submitted: dict[str, Any] | None
    finished: dict[str, Any] | None
    failure: dict[str, Any] | None
    #: The observed end of the job; the scheduler forgets it.
    observed_end: dict[str, Any] | None
    #: The intent to continue the run in a successor job.
    handover: dict[str, Any] | None = None
    #: The newest start of the ranks.
    started: dict[str, Any] | None = None

    @property
    def job(self) -> JobRecord | None:
        """The last submitted job."""
        if self.submitted is None:
            return None
        return JobRecord(
            job_id=str(self.submitted["job_id"]),
            run=self.run,
            submitted=float(self.submitted["time"]),
            observed_state=str(self.observed_end["job_state"]) if self.observed_end else None,
        )

    @property
    def job_id(self) -> str | None:
        return str(self.submitted["job_id"]) if self.submitted else None

    @property
    def backend(self) -> BackendName | None:
        if self.submitted is None:
            return None
        return "slurm" if self.submitted["backend"] == "slurm" else "local"


def read_run_record(run: RunDir) -> RunRecord:
    """Read the events since the last submission.

    An end is ignored if workers were started afterwards. A failure without a rank is also ignored: it is a
    failed checkpoint, after which the run continues.
    """
    return summarize_events(run, read_last_records(run.events, is_event, unless=_IGNORED_EVENTS, whole=True))


def summarize_events(run: RunDir, newest_first: Iterable[dict[str, Any]]) -> RunRecord:
    """Return the record of a run from its events. See `read_run_record`."""
    newest: dict[str, dict[str, Any]] = {}
    for event in newest_first:
        kind = str(event.get("kind"))
        if kind in ("finished", "failure", "seen", "handover") and "started" in newest:
            continue
        if kind == "failure" and event.get("rank") is None:
            continue
        newest.setdefault(kind, event)
        if kind == "submitted":
            break
    for kind in ("seen", "handover"):
        if newest.get(kind, {}).get("job_id") != newest.get("submitted", {}).get("job_id"):
            newest.pop(kind, None)  # A late event of the previous job.
    return RunRecord(
        run,
        *(newest.get(kind) for kind in ("submitted", "finished", "failure", "seen", "handover", "started")),
    )
