"""What a training consists of between two steps: what a checkpoint holds, but for the random state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hpctrain.checkpoint.store import Loaded
from hpctrain.errors import UserError
from hpctrain.training.data.feed import Feed
from hpctrain.training.differences import check_kind, ignored_settings
from hpctrain.training.module import Module
from hpctrain.training.optimization import Optimization


class HasState(Protocol):
    """Something whose state a checkpoint can keep."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class TrainingState:
    """The module and what changes with it from step to step.

    Attributes:
        step: completed optimizer steps.
        epoch: the epoch that the last of them lies in, from 0.
        finished: whether that step was the training's last.
        micro_batches: world size, and the size that was found for it; None where none was looked for.
        remarks: what of a loaded checkpoint could not be put back, in sentences.
        scaler: scales the loss of a training in float16; None in any other.
        callbacks: what a user has called at certain moments; None where there is nothing.
        algorithm: how replicas agree; None where there are none.
        validated_step: the step after which `validation` was measured, or 0.
        validation: latest results of validation.
        latest: latest scalars that were logged.
    """

    def __init__(self, module: Module, optimization: Optimization, feed: Feed) -> None:
        self.module, self.feed = module, feed
        self.optimizers, self.schedulers = optimization.optimizers, optimization.schedulers
        self.scaler: HasState | None = None
        self.callbacks: HasState | None = None
        self.algorithm: HasState | None = None
        self.step = self.epoch = 0
        self.finished = False
        self.micro_batches: tuple[int, int] | None = None
        self.remarks: list[str] = []
        self.validated_step = 0
        self.validation: dict[str, float] = {}
        self.latest: dict[str, float] = {}

    def tree(self) -> dict[str, Any]:
        """Everything that a checkpoint keeps, as nested containers of plain values and tensors."""
        own: dict[str, Any] = {}
        self.module.on_save_checkpoint(own)
        return {
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "callbacks": {} if self.callbacks is None else self.callbacks.state_dict(),
            "algorithm": {} if self.algorithm is None else self.algorithm.state_dict(),
            "user": own,
            "plan": self.feed.identity(),
            "epoch": self.epoch,
            "position": self.feed.state_dict(),
            "micro_batches": self.micro_batches,
            "validated_step": self.validated_step,
            "validation": self.validation,
            "latest": self.latest,
        }

    def like(self) -> dict[str, Any]:
        """`tree`, with parameters in place of what optimizers keep for them, which is cut as these are."""
        return {**self.tree(), "optimizers": [_parameters(optimizer) for optimizer in self.optimizers]}

    def load(self, loaded: Loaded) -> None:
        """Put back what `tree` returned.

        Raises:
            UserError: the checkpoint belongs to another model, data set or batch size.
        """
        tree = loaded.state
        # A checkpoint that was imported has no order of samples: training begins with one of its own.
        if tree["plan"] is not None and tree["plan"] != self.feed.identity():
            raise UserError(
                f"{loaded.path} was trained with {tree['plan']}, but this script asks for "
                f"{self.feed.identity()}. "
                "The order of samples depends on these: put them back, or start a new run in a new folder."
            )
        ignored = ignored_settings(self.optimizers, tree["optimizers"])
        try:
            self.module.load_state_dict(tree["module"])
            _load_each("optimizer", self.optimizers, tree["optimizers"])
            _load_each("scheduler", self.schedulers, tree["schedulers"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                f"{loaded.path} does not fit {type(self.module).__name__} and its optimizers: {error} "
                "Put the model back as it was, or start a new run in a new folder."
            ) from error
        if self.scaler is not None and tree["scaler"] is not None:
            self.scaler.load_state_dict(tree["scaler"])
        if self.callbacks is not None:
            self.callbacks.load_state_dict(tree.get("callbacks", {}))
        if self.algorithm is not None:
            self.algorithm.load_state_dict(tree.get("algorithm", {}))
        if tree["user"]:
            self.module.on_load_checkpoint(tree["user"])
        if tree["plan"] is not None:
            self.remarks = self.feed.load_state_dict(tree["position"])
            self.epoch, self.micro_batches = tree["epoch"], tree["micro_batches"]
        self.remarks = [*ignored, *self.remarks]
        self.step, self.validated_step = loaded.step, tree["validated_step"]
        self.validation, self.latest = tree["validation"], tree["latest"]


def _parameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The parameters of an optimizer, by the numbers that its `state_dict` has for them."""
    groups = optimizer.param_groups
    return {"state": dict(enumerate(parameter for group in groups for parameter in group["params"]))}


def _load_each(what: str, things: Sequence[HasState], states: Sequence[dict[str, Any]] | None) -> None:
    """Give each of `things` its state. None stands for a checkpoint that has none to give."""
    if states is None:
        return
    if len(things) != len(states):
        raise ValueError(f"it has {len(states)} {what}s, and the script {len(things)}.")
    for thing, state in zip(things, states, strict=True):
        if isinstance(thing, torch.optim.Optimizer):
            check_kind(thing, state)
        thing.load_state_dict(state)
