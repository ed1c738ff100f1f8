"""What to do after an attempt: pure functions of what happened so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

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

        A step saved a second time is no new checkpoint. Of a script's own checkpoints the step is not known.
        """
        failures = stops = crashes = newest = 0
        for event in events:
            match event.get("kind"):
                case "submitted":
                    failures = stops = crashes = 0
                case "checkpoint" if event["step"] is None:
                    failures = stops = 0
                case "checkpoint" if event["step"] > newest:
                    newest = event["step"]
                    failures = stops = crashes = 0
                case "failure" if event.get("rank") is not None:
                    failures += 1
                    crashes += 1
                case "requeue":
                    stops = stops + 1 if event.get("seconds", 0.0) < SHORT_ATTEMPT_S else 0
        return cls(failures, stops, crashes)


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


class Will(Enum):
    """What the user and the scheduler want with the job."""

    GO_ON = "go on"
    CANCEL = "cancel"
    """The user asked to end it."""
    LEAVE = "leave"
    """The scheduler is ending it, and decides itself what follows."""


class Action(Enum):
    """What to do now."""

    RESTART = "restart"
    """Start the workers again inside the allocation."""
    REQUEUE = "requeue"
    """Give the allocation back and ask for another."""
    LEAVE = "leave"
    """End without a verdict: the scheduler has taken over."""
    COMPLETE = "complete"
    CANCEL = "cancel"
    FAIL = "fail"


def decide(
    history: History, outcome: Outcome, will: Will, max_failures: int, *, time_is_short: bool = False
) -> Action:
    """The action that follows from how an attempt ended.

    Args:
        history: counts that include this attempt's own failure.
        outcome: how the attempt ended.
        will: what the user and the scheduler want.
        max_failures: crashes in a row without a new checkpoint that end the run.
        time_is_short: whether the ranks would be told to stop as soon as they are started again.
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
        case Outcome.FAILED:
            return Action.REQUEUE if time_is_short else Action.RESTART
        case Outcome.NOT_STARTED:
            # Other nodes may do, and the scheduler knows by then which of these does not.
            return Action.REQUEUE
        case Outcome.DOOMED | Outcome.OUT_OF_TIME:
            return Action.FAIL
