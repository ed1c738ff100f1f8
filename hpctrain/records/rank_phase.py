"""Phases of a rank, as reported in heartbeats. The run records their durations."""

from __future__ import annotations

from enum import StrEnum


class RankPhase(StrEnum):
    """Activity of a rank."""

    START = "start"
    """Until a `Trainer` starts, or until the first call of `hpctrain.should_stop`."""
    JOIN = "join"
    """In `init_process_group` of a script, until all ranks have arrived."""
    SCRIPT = "script"
    """From the first optimizer step of a script without a `Trainer`."""
    LOAD = "load"
    FIRST = "first"
    """The first step, which may compile. Only the supervisor distinguishes it from `DATA` and `STEP`."""
    DATA = "data"
    STEP = "step"
    VALIDATE = "validate"
    SAVE = "save"
    END = "end"
