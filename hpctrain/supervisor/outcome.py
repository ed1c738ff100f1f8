"""How a step ended, as far as its tasks tell."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """How an attempt ended."""

    DONE = "done"
    """Every rank finished."""
    STOPPED = "stopped"
    """The ranks were told to stop and left, to be continued."""
    FAILED = "failed"
    """A rank crashed."""
    NOT_STARTED = "not started"
    """The scheduler did not start the step: a node is broken, perhaps."""
    OUT_OF_TIME = "out of time"
    """The ranks did not leave before the time limit."""
