"""Interface of a logger, which receives the metrics of a run, each step once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

#: End of an attempt: completed, stopped for a later resume, or other.
TrainingEnd = Literal["completed", "stopped", "failed"]


@dataclass(frozen=True)
class LoggedRun:
    """The run whose metrics are logged."""

    run_id: str
    folder: Path
    """The run folder."""
    known: str | None = None
    """Value that `start` returned in an earlier attempt, such as the name of the run in the tracker."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Training settings and hyper-parameters, as plain values."""
    hparams: Mapping[str, Any] = field(default_factory=dict)
    """The hyper-parameters alone, without the training settings."""


@dataclass(frozen=True)
class MetricRecord:
    """Metrics of one step."""

    step: int
    time: float
    """Seconds since the epoch."""
    attempt: int
    epoch: int
    values: Mapping[str, float]


@runtime_checkable
class Logger(Protocol):
    """Receiver of a run's metrics, in a separate process that cannot block training.

    Methods are called one at a time. An exception is reported in the log of rank 0, and the call is repeated
    later. The logger is pickled for transfer to its process.
    """

    name: str
    """Name of the logger's state in the run folder, unique among the loggers of a run."""

    def start(self, run: LoggedRun) -> str | None:
        """Start or resume logging. The return value is saved, and passed as `known` in the next attempt."""

    def log(self, lines: Sequence[MetricRecord]) -> None:
        """Log the metrics of some steps. No value of a step is sent twice, unless `rewind` returned True."""

    def rewind(self, step: int) -> bool:
        """Discard everything after `step`, which is trained again; return False if that is impossible."""

    def finish(self, ending: TrainingEnd) -> None:
        """Ensure that all lines have been delivered."""
