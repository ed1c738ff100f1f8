"""Intent of the user and the scheduler for a job, and ways to continue it: pure functions."""

from __future__ import annotations

from enum import Enum

from hpctrain.spec.job_spec import ResumeMode


class JobDisposition(Enum):
    """The scheduler's plan for the job."""

    STAYS = "stays"
    REQUEUED = "requeued"
    """It is being ended and will start again."""
    EVICTED = "evicted"
    """It is being ended for good, though not by request: preemption, or a lost node."""
    ENDS = "ends"
    """It is being ended for good."""


class JobIntent(Enum):
    """Intent of the user and the scheduler for the job."""

    GO_ON = "continue"
    CANCEL = "cancel"
    """The user asked to end it."""
    LEAVE = "leave"
    """The scheduler is ending it and decides what follows."""
    MOVE = "move"
    """The scheduler is ending it for good, and the run must continue in another job."""


def resolve_intent(*, cancelled: bool, fate: JobDisposition, resume_mode: ResumeMode) -> JobIntent:
    """Combine the user's request and the scheduler's action into one intent."""
    if cancelled:
        return JobIntent.CANCEL
    match fate:
        case JobDisposition.STAYS:
            return JobIntent.GO_ON
        case JobDisposition.EVICTED if resume_mode != "requeue":
            return JobIntent.MOVE
        case JobDisposition.REQUEUED | JobDisposition.EVICTED | JobDisposition.ENDS:
            return JobIntent.LEAVE


class ContinuationMethod(Enum):
    """Ways to get another allocation."""

    REQUEUE = "requeue"
    """Put the same job back into the queue."""
    SUCCESSOR = "successor"
    """Continue the run in another job."""


def continuation_methods(
    resume_mode: ResumeMode, will: JobIntent, *, requeues: bool
) -> tuple[ContinuationMethod, ...]:
    """Return the methods to try in order, each after the scheduler refuses the one before.

    Args:
        resume_mode: the user's preference.
        will: the intent for the job.
        requeues: True if the site requeues jobs, and would requeue this one.
    """
    if will is JobIntent.MOVE:
        return (ContinuationMethod.SUCCESSOR,)
    match resume_mode:
        case "requeue":
            return (ContinuationMethod.REQUEUE,)
        case "auto" if requeues:
            return (ContinuationMethod.REQUEUE, ContinuationMethod.SUCCESSOR)
        case "auto" | "successor":
            return (ContinuationMethod.SUCCESSOR, ContinuationMethod.REQUEUE)
