"""What a logger is: something that gets the metrics of a run, each step once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

#: How a start of the ranks ends: all is trained; told to stop, to go on later; or anything else.
Ending = Literal["completed", "stopped", "failed"]


@dataclass(frozen=True)
class LoggedRun:
    """The run whose metrics are logged."""

    run_id: str
    folder: Path
    """The run folder."""
    known: str | None = None
    """What `start` returned in an earlier start of the ranks: the tracker's own name for the run."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the training, as plain values."""


@dataclass(frozen=True)
class Line:
    """What was measured in a step."""

    step: int
    time: float
    """Seconds since the epoch."""
    attempt: int
    epoch: int
    values: Mapping[str, float]


@runtime_checkable
class Logger(Protocol):
    """Gets the metrics of a run, in a process of its own, so that whatever it does holds up no training.

    Its methods are called one after the other. Where one raises an exception, that is said in the log of rank
    0, and it is called again later. It is pickled on its way to its process.
    """

    name: str
    """What its memory in the run folder is called; two of one training have different names."""

    def start(self, run: LoggedRun) -> str | None:
        """Begin, or go on. What is returned is remembered, and told as `known` the next time."""

    def log(self, lines: Sequence[Line]) -> None:
        """Take lines. No value of a step comes a second time, unless `rewind` returned True."""

    def rewind(self, step: int) -> bool:
        """Forget what came after `step`, for it is trained again; return False where that cannot be done."""

    def finish(self, ending: Ending) -> None:
        """See to it that all lines have arrived."""
