"""Runs in a few words: events and metrics of what may happen to one, at times that a test can add up."""

from __future__ import annotations

from typing import Any

START = 1_764_000_000.0


class Story:
    """What a run writes down, second by second."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.now, self.attempt = START, -1

    def after(self, seconds: float, kind: str, /, **fields: Any) -> Story:
        """An event, so many seconds after what came before it."""
        self.now += seconds
        self.attempt += kind == "started"
        self.events.append(
            {"time": self.now, "attempt": max(0, self.attempt), "kind": kind, **fields},
        )
        return self

    def steps(self, first: int, last: int, *, every: float, **fields: Any) -> Story:
        """Steps `first` to `last`, each taking `every` seconds."""
        for step in range(first, last + 1):
            self.now += every
            record = {"loss": 1 / step, "step": step, "epoch": 0, "time": self.now, "attempt": self.attempt}
            self.metrics.append({**record, **fields})
        return self


def submitted(seconds: float = 0.0) -> Story:
    """A run that has been started after so many seconds in the queue."""
    return Story().after(0, "submitted", job_id="7", backend="slurm").after(seconds, "started", nodes=2)
