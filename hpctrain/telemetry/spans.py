"""What a run's time may be spent on, and stretches of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class What(StrEnum):
    """What a run's time is spent on."""

    TRAINING = "training"
    COMMUNICATING = "communicating"
    DATA = "waiting for data"
    VALIDATING = "validating"
    SAVING = "saving"
    LOADING = "loading"
    STARTING = "starting"
    RESTARTING = "restarting"
    LOST = "lost work"
    QUEUED = "queued"
    IDLE = "idle"


@dataclass(frozen=True)
class Span:
    """A stretch of a run's time; microseconds since the epoch, the end excluded."""

    start_us: int
    end_us: int
    what: What
    attempt: int | None
    """The start of the workers in or after which it lies; None before the first."""
