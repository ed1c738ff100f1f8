"""What a training consists of between two steps: what a checkpoint holds, but for the random state."""

from __future__ import annotations

from typing import Any

from hpctrain.checkpoint.store import Loaded
from hpctrain.errors import UserError
from hpctrain.training.batches import BatchPlan
from hpctrain.training.module import Module, Optimization


class TrainingState:
    """The module and what changes with it from step to step.

    Attributes:
        step: completed optimizer steps.
        validated_step: the step after which `validation` was measured, or 0.
        validation: latest results of validation.
        latest: latest scalars that were logged.
    """

    def __init__(self, module: Module, optimization: Optimization, plan: BatchPlan) -> None:
        self.module, self.plan = module, plan
        self.optimizer, self.scheduler = optimization.optimizer, optimization.scheduler
        self.step = 0
        self.validated_step = 0
        self.validation: dict[str, float] = {}
        self.latest: dict[str, float] = {}

    def tree(self) -> dict[str, Any]:
        """Everything that a checkpoint keeps, as nested containers of plain values and tensors."""
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "plan": self.plan.identity(),
            "validated_step": self.validated_step,
            "validation": self.validation,
            "latest": self.latest,
        }

    def load(self, loaded: Loaded) -> None:
        """Put back what `tree` returned.

        Raises:
            UserError: the checkpoint belongs to another model, data set or batch size.
        """
        tree = loaded.state
        if tree["plan"] != self.plan.identity():
            raise UserError(
                f"{loaded.path} was trained with {tree['plan']}, but this script asks for "
                f"{self.plan.identity()}. "
                "The order of samples depends on these: put them back, or start a new run in a new folder."
            )
        try:
            self.module.load_state_dict(tree["module"])
            self.optimizer.load_state_dict(tree["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"{loaded.path} does not fit {type(self.module).__name__} and its optimizer: {error} "
                "Put the model back as it was, or start a new run in a new folder."
            ) from error
        if self.scheduler is not None and tree["scheduler"] is not None:
            self.scheduler.load_state_dict(tree["scheduler"])
        self.step, self.validated_step = loaded.step, tree["validated_step"]
        self.validation, self.latest = tree["validation"], tree["latest"]
