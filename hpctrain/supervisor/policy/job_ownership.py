"""Choice of the one job that trains when a run has several."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class OwnershipDecision(Enum):
    """Action of a job when it starts."""

    BEGIN = "begin"
    OVER = "over"
    """End: the run is over."""
    SUPERSEDED = "superseded"
    """End: another job continues the run."""
    CANCEL = "cancel"
    """End the run: the user cancelled it while none of its jobs was running."""


@dataclass(frozen=True)
class OwnershipState:
    """Position of a starting job among the jobs of its run."""

    job_id: str
    newest: str | None
    """The newest job in the run's record; None if it names none."""
    ended: str | None = None
    """The state in which the run ended since that job was submitted."""
    cancelled: bool = False
    predecessor: str | None = None
    """The job that this one was submitted to continue; None if the user submitted it."""
    heir: str | None = None
    """The job that has taken over from the predecessor: this one, unless another was faster."""
    successor: str | None = None
    """A job that was submitted to continue this one, although Slurm then requeued this one."""

    def __str__(self) -> str:
        facts = {
            "newest job on record": self.newest,
            "run ended as": self.ended,
            "continues job": self.predecessor,
            "which was taken over by job": self.heir,
            "is continued by job": self.successor,
        }
        parts = [f"{name} {value}" for name, value in facts.items() if value is not None]
        return ", ".join([*parts, *(["run cancelled"] if self.cancelled else [])]) or "first job of the run"


def decide_ownership(standing: OwnershipState) -> OwnershipDecision:
    """Decide what a starting job does: of several jobs of a run, one trains."""
    it = standing
    if it.successor is not None:
        return OwnershipDecision.SUPERSEDED
    if it.predecessor is not None:
        if it.heir != it.job_id or it.newest not in (it.job_id, it.predecessor):
            return OwnershipDecision.SUPERSEDED
        if it.ended is not None:
            return OwnershipDecision.OVER
        return OwnershipDecision.CANCEL if it.cancelled else OwnershipDecision.BEGIN
    # A run that ended in another state continues when the user starts its job again.
    return OwnershipDecision.OVER if it.ended == "COMPLETED" else OwnershipDecision.BEGIN
