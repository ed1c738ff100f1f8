"""Decide which job of a run trains, and in which job the run continues, as pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hpctrain.jobspec.job_spec import ResumeMode


class JobDisposition(Enum):
    """The scheduler's plan for the job."""

    STAYS = "stays"
    REQUEUED = "requeued"
    EVICTED = "evicted"
    """The job is being ended permanently, but not by request: preemption, or a lost node."""
    ENDS = "ends"


class JobIntent(Enum):
    """Intent of the user and the scheduler for the job."""

    CONTINUE = "continue"
    CANCEL = "cancel"
    YIELD = "leave"
    """The scheduler is ending the job and decides on the continuation."""
    RELOCATE = "move"
    """The scheduler is ending the job permanently; the run must continue in another job."""


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
    REQUEUE = "requeue"
    SUCCESSOR = "successor"


def continuation_methods(
    resume_mode: ResumeMode, intent: JobIntent, *, can_requeue: bool
) -> tuple[ContinuationMethod, ...]:
    """Return the methods in the order in which to try them, until the scheduler accepts one."""
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
    """Exit: the run is over."""
    SUPERSEDED = "superseded"
    """Exit: another job continues the run."""
    CANCEL = "cancel"
    """End the run: the user cancelled it while no supervisor was running."""


@dataclass(frozen=True)
class OwnershipState:
    """Position of a starting job among the jobs of the run."""

    job_id: str
    newest: str | None
    newest_after: str | None = None
    """The predecessor of that job; None if the user submitted it."""
    ended: str | None = None
    """The final state of the run since the submission of that job."""
    cancelled: bool = False
    predecessor: str | None = None
    claimed_by: str | None = None
    """The job that has taken over from the predecessor: this job, unless another was faster."""
    successor: str | None = None
    """The successor of this job, if Slurm requeued this job after it had submitted a successor."""


def decide_ownership(state: OwnershipState) -> OwnershipDecision:
    """Decide the action of a starting job: only one job of a run trains."""
    if state.successor is not None:
        return OwnershipDecision.SUPERSEDED
    if state.predecessor is not None:
        # The claim decides between several successors, also if another one was recorded.
        is_newest = (
            state.newest in (state.job_id, state.predecessor) or state.newest_after == state.predecessor
        )
        if state.claimed_by != state.job_id or not is_newest:
            return OwnershipDecision.SUPERSEDED
    elif state.newest != state.job_id:
        # `hpctrain submit` is about to record this job, or another job has replaced it.
        return OwnershipDecision.BEGIN
    if state.ended is not None:
        return OwnershipDecision.OVER
    return OwnershipDecision.CANCEL if state.cancelled else OwnershipDecision.BEGIN
