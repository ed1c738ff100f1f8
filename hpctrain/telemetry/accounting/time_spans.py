"""Categories and spans of a run's time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TimeCategory(StrEnum):
    """Category of a run's time."""

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


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A span of a run's time, in microseconds since the epoch; the end is exclusive."""

    start_us: int
    end_us: int
    category: TimeCategory
    attempt: int | None
    """The attempt during or before this span; None before the first attempt."""
