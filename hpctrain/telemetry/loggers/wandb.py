"""Logger for Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from hpctrain.telemetry.loggers.logger import LoggedRun, MetricRecord, TrainingEnd


@dataclass
class Wandb:
    """Logger that writes one Weights & Biases run for all attempts. Needs `pip install wandb`.

    Environment variables of Weights & Biases are respected, such as WANDB_MODE, WANDB_PROJECT and
    WANDB_API_KEY. Local files are in the run folder.
    """

    project: str | None = None
    entity: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of `wandb.init`."""
    name: str = "wandb"

    def start(self, run: LoggedRun) -> str:
        import wandb

        self._run: Any = wandb.init(
            **{
                "project": self.project,
                "entity": self.entity,
                "name": run.run_id,
                "dir": str(run.folder),
                "id": run.known or uuid4().hex[:12],
                # Resumes the run with that id, or creates it.
                "resume": "allow",
                "config": dict(run.config),
                **self.options,
            }
        )
        # The step is logged as a metric and used as the axis. The tracker's own step only increases, but a
        # repeated step may log a new metric, such as for validation.
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, lines: Sequence[MetricRecord]) -> None:
        for line in lines:
            self._run.log({"step": line.step, "epoch": line.epoch, **line.values})

    def rewind(self, step: int) -> bool:  # noqa: ARG002
        return False

    def finish(self, ending: TrainingEnd) -> None:
        if ending == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ending == "completed" else 1)
