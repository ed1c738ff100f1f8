"""What a job does when it starts: of several jobs of a run, one trains."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Entry(Enum):
    """What a job does when it starts."""

    BEGIN = "begin"
    OVER = "over"
    """End: the run is over."""
    SUPERSEDED = "superseded"
    """End: another job continues the run."""
    CANCEL = "cancel"
    """End the run: the user asked for that while no job of it was there to hear it."""


@dataclass(frozen=True)
class Standing:
    """Where a job stands among the jobs of its run when it starts."""

    job_id: str
    newest: str | None
    """The job that the run's record names as the newest; None where it names none, or this one by hand."""
    ended: str | None = None
    """The state in which the run ended since that job was submitted."""
    cancelled: bool = False
    predecessor: str | None = None
    """The job that this one was submitted to continue; None where the user submitted it."""
    heir: str | None = None
    """The job that has taken over after the predecessor: this one, unless another was faster."""
    successor: str | None = None
    """A job that was submitted to continue this one, which Slurm has requeued all the same."""


def enter(standing: Standing) -> Entry:
    """What a job does when it starts: of several jobs of a run, one trains."""
    it = standing
    if it.successor is not None:
        return Entry.SUPERSEDED
    if it.predecessor is not None:
        if it.heir != it.job_id or it.newest not in (it.job_id, it.predecessor):
            return Entry.SUPERSEDED
        if it.ended is not None:
            return Entry.OVER
        return Entry.CANCEL if it.cancelled else Entry.BEGIN
    # A run that ended otherwise goes on where the user has its job start again.
    return Entry.OVER if it.ended == "COMPLETED" else Entry.BEGIN
