"""Summarize the events of a run: its submission, outcome, and last activity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from hpctrain.jobspec.job_spec import BackendName
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import JobRecord

if TYPE_CHECKING:
    from hpctrain.record_types import Event


#: Most events of a long run are checkpoints, which are irrelevant to its state.
_IGNORED_EVENTS = b'"kind": "checkpoint"'


class RunRecord(Struct, frozen=True):
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
    from hpctrain.record_types import Event

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
