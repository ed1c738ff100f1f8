"""What to do after an attempt: pure functions of what happened so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hpctrain.jobs.spec import ContinueBy

#: Short stops in a row, with no new checkpoint between them, after which a run is taken to get nowhere.
MAX_STOPS = 10
#: An attempt that lasted longer than this may have got somewhere: a script may save without our knowing.
SHORT_ATTEMPT_S = 300.0
#: Files that a script writes may say nothing of its progress: one that starts anew writes them anew.
#: So the crashes between which it only wrote files are at most this many times as many as those in a row.
CRASHES_PER_FAILURE = 10


@dataclass(frozen=True)
class History:
    """What matters of a run's past, counted since it was submitted."""

    failures: int = 0
    """Crashes in a row, with no new checkpoint between them."""
    stops: int = 0
    """Short attempts in a row that ended with a stop, with no new checkpoint between them."""
    crashes: int = 0
    """Crashes since the last checkpoint of which the step is known."""

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> History:
        """Count over the run's events, oldest first.

        A successor job goes on with the counts; only a submission by the user starts them anew.
        A step saved a second time is no new checkpoint. Of a script's own checkpoints the step is not known.
        """
        failures = stops = crashes = newest = 0
        for event in events:
            match event.get("kind"):
                case "submitted" if "after" not in event:
                    failures = stops = crashes = 0
                case "checkpoint" if event["step"] is None:
                    failures = stops = 0
                case "checkpoint" if event["step"] > newest:
                    newest = event["step"]
                    failures = stops = crashes = 0
                case "failure" if event.get("rank") is not None:
                    failures += 1
                    crashes += 1
                case "shrink":
                    # A node that is lost says nothing of the script, and there are only so many of them.
                    failures, crashes = max(0, failures - 1), max(0, crashes - 1)
                case "requeue":
                    stops = stops + 1 if event.get("seconds", 0.0) < SHORT_ATTEMPT_S else 0
        return cls(failures, stops, crashes)


@dataclass(frozen=True)
class Nodes:
    """How an allocation stands after an attempt."""

    left: int = 1
    """Nodes on which ranks can be started."""
    least: int = 1
    """Nodes without which the run does not go on."""
    lost: int = 0
    """Nodes that were lost in this attempt."""

    @property
    def suffice(self) -> bool:
        return self.left >= self.least


class Outcome(Enum):
    """How an attempt ended."""

    DONE = "done"
    """Every rank finished."""
    STOPPED = "stopped"
    """The ranks were told to stop and left, to be continued."""
    FAILED = "failed"
    """A rank crashed."""
    DOOMED = "doomed"
    """A rank crashed, and would again: the function that it called raised an exception."""
    NOT_STARTED = "not started"
    """The scheduler did not start the step: a node is broken, perhaps."""
    OUT_OF_TIME = "out of time"
    """The ranks did not leave before the time limit."""


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


class Action(Enum):
    """What to do now."""

    RESTART = "restart"
    """Start the workers again inside the allocation."""
    SHRINK = "shrink"
    """Start the workers again on the nodes that are left of the allocation."""
    REQUEUE = "requeue"
    """Give the allocation back and ask for another."""
    LEAVE = "leave"
    """End without a verdict: the scheduler has taken over."""
    COMPLETE = "complete"
    CANCEL = "cancel"
    FAIL = "fail"


def decide(
    history: History,
    outcome: Outcome,
    will: Will,
    max_failures: int,
    *,
    time_is_short: bool = False,
    nodes: Nodes = Nodes(),
) -> Action:
    """The action that follows from how an attempt ended.

    Args:
        history: counts that include this attempt's own failure.
        outcome: how the attempt ended.
        will: what the user and the scheduler want.
        max_failures: crashes in a row without a new checkpoint that end the run.
        time_is_short: whether the ranks would be told to stop as soon as they are started again.
        nodes: how the allocation stands.
    """
    if outcome is Outcome.DONE:
        return Action.COMPLETE
    if will is Will.CANCEL:
        return Action.CANCEL
    if will is Will.LEAVE:
        return Action.LEAVE
    match outcome:
        case Outcome.STOPPED:
            return Action.REQUEUE if history.stops < MAX_STOPS else Action.FAIL
        case Outcome.FAILED | Outcome.NOT_STARTED if (
            history.failures >= max_failures or history.crashes >= CRASHES_PER_FAILURE * max_failures
        ):
            return Action.FAIL
        case Outcome.FAILED | Outcome.NOT_STARTED if time_is_short or will is Will.MOVE or not nodes.suffice:
            return Action.REQUEUE
        case Outcome.FAILED | Outcome.NOT_STARTED if nodes.lost:
            return Action.SHRINK
        case Outcome.FAILED:
            return Action.RESTART
        case Outcome.NOT_STARTED:
            # Other nodes may do, and the scheduler knows by then which of these does not.
            return Action.REQUEUE
        case Outcome.DOOMED | Outcome.OUT_OF_TIME:
            return Action.FAIL


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
