"""Outcome of an attempt, judged from its tasks."""

from __future__ import annotations

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
