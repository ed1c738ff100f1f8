"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from hpctrain.telemetry.loggers.protocol import Ending, Line, LoggedRun


@dataclass
class Wandb:
    """A run of Weights & Biases, one for all starts of the ranks. Needs `pip install 'hpctrain[wandb]'`.

    Its variables count, such as WANDB_MODE, WANDB_PROJECT and WANDB_API_KEY. Without a mode its files lie in
    the run folder.
    """

    project: str | None = None
    entity: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Whatever else `wandb.init` takes."""
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
                # Goes on with the run of that id, or makes it.
                "resume": "allow",
                "config": dict(run.config),
                **self.options,
            }
        )
        # A step that is trained again may bring a metric that was not there before, as validation does, and
        # the tracker's own count of steps only goes up: so the axis is a metric of ours.
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._run.log({"step": line.step, "epoch": line.epoch, **line.values})

    def rewind(self, step: int) -> bool:  # noqa: ARG002
        return False

    def finish(self, ending: Ending) -> None:
        if ending == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ending == "completed" else 1)
