"""Pure functions about the jobs of a run: the one that trains, its intended fate, and its continuation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hpctrain.spec.job_spec import ResumeMode


class JobDisposition(Enum):
    """The scheduler's plan for the job."""

    STAYS = "stays"
    REQUEUED = "requeued"
    """It is being ended and intent start again."""
    EVICTED = "evicted"
    """It is being ended for good, though not by request: preemption, or a lost node."""
    ENDS = "ends"
    """It is being ended for good."""


class JobIntent(Enum):
    """Intent of the user and the scheduler for the job."""

    CONTINUE = "continue"
    CANCEL = "cancel"
    """The user asked to end it."""
    YIELD = "leave"
    """The scheduler is ending it and decides what follows."""
    RELOCATE = "move"
    """The scheduler is ending it for good, and the run must continue in another job."""


def resolve_intent(*, cancelled: bool, disposition: JobDisposition, resume_mode: ResumeMode) -> JobIntent:
    """Combine the user's request and the scheduler's action into one intent."""
    if cancelled:
        return JobIntent.CANCEL
    match disposition:
        case JobDisposition.STAYS:
            return JobIntent.CONTINUE
        case JobDisposition.EVICTED if resume_mode != "requeue":
            return JobIntent.RELOCATE
        case JobDisposition.REQUEUED | JobDisposition.EVICTED | JobDisposition.ENDS:
            return JobIntent.YIELD


class ContinuationMethod(Enum):
    """Ways to get another allocation."""

    REQUEUE = "requeue"
    """Put the same job back into the queue."""
    SUCCESSOR = "successor"
    """Continue the run in another job."""


def continuation_methods(
    resume_mode: ResumeMode, intent: JobIntent, *, can_requeue: bool
) -> tuple[ContinuationMethod, ...]:
    """Return the methods to try in order, each after the scheduler refuses the one before.

    Args:
        resume_mode: the user's preference.
        intent: the intent for the job.
        can_requeue: True if the site requeues jobs, and would requeue this one.
    """
    if intent is JobIntent.RELOCATE:
        return (ContinuationMethod.SUCCESSOR,)
    match resume_mode:
        case "requeue":
            return (ContinuationMethod.REQUEUE,)
        case "auto" if can_requeue:
            return (ContinuationMethod.REQUEUE, ContinuationMethod.SUCCESSOR)
        case "auto" | "successor":
            return (ContinuationMethod.SUCCESSOR, ContinuationMethod.REQUEUE)


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
    claimed_by: str | None = None
    """The job that has taken over from the predecessor: this one, unless another was faster."""
    successor: str | None = None
    """A job that was submitted to continue this one, although Slurm then requeued this one."""

    def __str__(self) -> str:
        facts = {
            "newest job on record": self.newest,
            "run ended as": self.ended,
            "continues job": self.predecessor,
            "which was taken over by job": self.claimed_by,
            "is continued by job": self.successor,
        }
        parts = [f"{name} {value}" for name, value in facts.items() if value is not None]
        return ", ".join([*parts, *(["run cancelled"] if self.cancelled else [])]) or "first job of the run"


def decide_ownership(state: OwnershipState) -> OwnershipDecision:
    """Decide what a starting job does: of several jobs of a run, one trains."""
    it = state
    if it.successor is not None:
        return OwnershipDecision.SUPERSEDED
    if it.predecessor is not None:
        if it.claimed_by != it.job_id or it.newest not in (it.job_id, it.predecessor):
            return OwnershipDecision.SUPERSEDED
        if it.ended is not None:
            return OwnershipDecision.OVER
        return OwnershipDecision.CANCEL if it.cancelled else OwnershipDecision.BEGIN
    # A run that ended in another state continues when the user starts its job again.
    return OwnershipDecision.OVER if it.ended == "COMPLETED" else OwnershipDecision.BEGIN
