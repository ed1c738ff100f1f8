"""What a run has written down of itself: its submission, what became of it, and its last sign of life."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.jobs.spec import BackendName
from hpctrain.jobs.tail import last_records
from hpctrain.rundir import RunDir

#: Most events of a long run are checkpoints, which tell nothing about where it stands.
_PASSED_OVER = b'"kind": "checkpoint"'


@dataclass(frozen=True)
class Job:
    """A job that was handed to a scheduler, as the run's record has it."""

    job_id: str
    run: RunDir
    #: When it was submitted, in seconds since the epoch.
    submitted: float = 0.0
    #: Whether somebody else than hpctrain submitted it, from wherever and with whatever options.
    by_hand: bool = False
    #: Its end in the scheduler's word, where somebody saw it.
    seen: str | None = None


@dataclass(frozen=True)
class Record:
    """What the run itself has written since its last submission."""

    run: RunDir
    submitted: dict[str, Any] | None
    finished: dict[str, Any] | None
    failure: dict[str, Any] | None
    #: What somebody saw of the job's end in the scheduler, which forgets it.
    seen: dict[str, Any] | None
    #: The intent to have another job continue the run after this one.
    handover: dict[str, Any] | None = None
    #: The newest start of the ranks.
    started: dict[str, Any] | None = None

    @property
    def job(self) -> Job | None:
        """The job that was submitted last."""
        if self.submitted is None:
            return None
        return Job(
            job_id=str(self.submitted["job_id"]),
            run=self.run,
            submitted=float(self.submitted["time"]),
            by_hand=bool(self.submitted.get("by_hand")),
            seen=str(self.seen["job_state"]) if self.seen else None,
        )

    @property
    def job_id(self) -> str | None:
        return str(self.submitted["job_id"]) if self.submitted else None

    @property
    def backend(self) -> BackendName | None:
        if self.submitted is None:
            return None
        return "slurm" if self.submitted["backend"] == "slurm" else "local"


def read_record(run: RunDir) -> Record:
    """Read the events since the last submission. An end that workers were started after is none.

    Nor is such a failure the last one. One without a rank is of a checkpoint, and the run goes on after it.
    """
    last: dict[str, dict[str, Any]] = {}
    for event in last_records(run.events, unless=_PASSED_OVER, whole=True):
        kind = str(event.get("kind"))
        if kind in ("finished", "failure", "seen", "handover") and "started" in last:
            continue
        if kind == "failure" and event.get("rank") is None:
            continue
        last.setdefault(kind, event)
        if kind == "submitted":
            break
    for kind in ("seen", "handover"):
        if last.get(kind, {}).get("job_id") != last.get("submitted", {}).get("job_id"):
            last.pop(kind, None)  # It came late, of the job before.
    return Record(
        run, *(last.get(kind) for kind in ("submitted", "finished", "failure", "seen", "handover", "started"))
    )


def last_sign_of_life(run: RunDir) -> float:
    """When the run last wrote anything, in seconds since the epoch; 0 where it never did."""
    files = [run.events, run.metrics, run.slurm_log, run.supervisor_log]
    if attempts := run.attempts():
        files.append(run.rank_log(attempts[-1], 0))
    return max(map(_modified, files), default=0.0)


def _modified(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
