"""Phases of a rank, which it reports in its heartbeats and whose durations a run records."""

from __future__ import annotations

from enum import StrEnum


class RankPhase(StrEnum):
    """Activity of a rank."""

    START = "start"
    """Until a `Trainer` takes over, or `hpctrain.should_stop` is called for the first time."""
    SCRIPT = "script"
    """From the first optimizer step of a script without a `Trainer`."""
    LOAD = "load"
    FIRST = "first"
    """The first step, which may compile. Only the supervisor tells it from `DATA` and `STEP`."""
    DATA = "data"
    STEP = "step"
    VALIDATE = "validate"
    SAVE = "save"
    END = "end"
