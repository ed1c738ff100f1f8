"""What the user and the scheduler want with a job, and the ways to another one: pure functions."""

from __future__ import annotations

from enum import Enum

from hpctrain.jobs.spec import ContinueBy


class Fate(Enum):
    """What the scheduler does with the job."""

    STAYS = "stays"
    REQUEUED = "requeued"
    """It is being ended, and will be started again."""
    EVICTED = "evicted"
    """It is being ended for good, though nobody asked for that: others need its nodes, or one was lost."""
    ENDS = "ends"
    """It is being ended for good."""


class Will(Enum):
    """What the user and the scheduler want with the job."""

    GO_ON = "go on"
    CANCEL = "cancel"
    """The user asked to end it."""
    LEAVE = "leave"
    """The scheduler is ending it, and decides itself what follows."""
    MOVE = "move"
    """The scheduler is ending it for good, and the run is to go on in another job."""


def will_of(*, cancelled: bool, fate: Fate, continue_by: ContinueBy) -> Will:
    """What is wanted with the job, out of what the user asked for and what the scheduler does."""
    if cancelled:
        return Will.CANCEL
    match fate:
        case Fate.STAYS:
            return Will.GO_ON
        case Fate.EVICTED if continue_by != "requeue":
            return Will.MOVE
        case Fate.REQUEUED | Fate.EVICTED | Fate.ENDS:
            return Will.LEAVE


class Way(Enum):
    """How a run gets another allocation."""

    REQUEUE = "requeue"
    """The same job goes back to the queue."""
    SUCCESSOR = "successor"
    """Another job continues the run."""


def ways_on(continue_by: ContinueBy, will: Will, *, requeues: bool) -> tuple[Way, ...]:
    """The ways to be tried, one after the other where the scheduler refuses.

    Args:
        continue_by: what the user prefers.
        will: what is wanted with the job.
        requeues: whether the site requeues jobs, and this one.
    """
    if will is Will.MOVE:
        return (Way.SUCCESSOR,)
    match continue_by:
        case "requeue":
            return (Way.REQUEUE,)
        case "auto" if requeues:
            return (Way.REQUEUE, Way.SUCCESSOR)
        case "auto" | "successor":
            return (Way.SUCCESSOR, Way.REQUEUE)
