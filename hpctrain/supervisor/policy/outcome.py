"""Outcomes: of an attempt, based on its tasks, and of the supervisor's next action."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AttemptOutcome(Enum):
    """Outcome of an attempt."""

    DONE = "done"
    """Every rank finished."""
    STOPPED = "stopped"
    """The ranks received a stop signal and exited; the run continues later."""
    FAILED = "failed"
    """A rank crashed."""
    NOT_STARTED = "not started"
    """The scheduler did not start the step, for example because a node is broken."""
    OUT_OF_TIME = "out of time"
    """The ranks did not exit before the time limit."""


@dataclass(frozen=True)
class Continue:
    """The run continues in this job."""


@dataclass(frozen=True)
class Exit:
    """This job exits with this exit code."""

    code: int
