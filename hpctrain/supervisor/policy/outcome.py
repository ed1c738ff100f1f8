"""Outcomes: of an attempt, judged from its tasks, and of what the supervisor did after it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AttemptOutcome(Enum):
    """Outcome of an attempt."""

    DONE = "done"
    """Every rank finished."""
    STOPPED = "stopped"
    """The ranks received a stop signal and exited, to be continued."""
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
    """This job ends with this exit code."""

    code: int
