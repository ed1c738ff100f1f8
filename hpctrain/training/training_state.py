"""State of a training run between two steps: the content of a checkpoint, except for the random state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from hpctrain.checkpoint.convert.external_formats import match_names
from hpctrain.checkpoint.store import LoadedCheckpoint
from hpctrain.errors import UserError
from hpctrain.runtime.resumed_values import IgnoredValue, configured_values, ignored_values
from hpctrain.text import pluralize
from hpctrain.training.data.step_source import StepSource
from hpctrain.training.determinism.elastic_determinism import ElasticDeterminism
from hpctrain.training.module import Module, is_manual
from hpctrain.training.observe.loss_guard import LossGuard
from hpctrain.training.optim.optimizer_setup import OptimizerSetup, check_optimizer_class


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class TrainingState:
    def __init__(
        self, module: Module, optimization: OptimizerSetup, source: StepSource, loss_guard: LossGuard
    ) -> None:
        self.module, self.source, self.loss_guard = module, source, loss_guard
        self.optimizers, self.schedulers = optimization.optimizers, optimization.schedulers
        self._script = self._configured = configured_values(self.optimizers, self.schedulers)
        #: Values of the script that differ from those in the loaded checkpoint.
        self.ignored: list[IgnoredValue] = []
        #: True if gradients may remain after a step.
        self.keeps_gradients = is_manual(module)
        self.scaler: Stateful | None = None
        self.callbacks: Stateful | None = None
        self.algorithm: Stateful | None = None
        self.determinism: ElasticDeterminism | None = None
        #: Completed optimizer steps, and the epoch of the last of them, counted from 0.
        self.step = self.epoch = 0
        #: True if that step was the last step of training.
        self.finished = False
        #: Parts of a loaded checkpoint that could not be restored, as sentences.
        self.remarks: list[str] = []
        self.is_position_restored = True
        #: Last step after which the replicas were equal; None if they are not compared.
        self.compared_step: int | None = None
        #: Last step in which gradients were computed twice; None without a witness.
        self.witnessed_step: int | None = None
        #: Results of the latest validation, and its step, or 0.
        self.validation: dict[str, float] = {}
        self.validated_step = 0
        #: Latest logged scalars.
        self.latest: dict[str, float] = {}

    @property
    def verified_step(self) -> int | None:
        """Last step after which the state is known to be good; None if it is not verified."""
        steps = (self.compared_step, self.witnessed_step)
        return min((step for step in steps if step is not None), default=None)

    def tree(self) -> dict[str, Any]:
        """Return the content of a checkpoint, as nested containers of plain values and tensors."""
        user: dict[str, Any] = {}
        self.module.on_save_checkpoint(user)
        return {
            "module": self.module.state_dict(),
            **({"gradients": self._gradients()} if self.keeps_gradients else {}),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "configured": self._configured,
            **{name: None if source is None else source.state_dict() for name, source in self._optional()},
            "determinism": None if self.determinism is None else self.determinism.state_dict(),
            "loss_guard": self.loss_guard.state_dict(),
            "user": user,
            "plan": self.source.identity(),
            "epoch": self.epoch,
            "position": self.source.state_dict(),
            "validated_step": self.validated_step,
            "validation": self.validation,
            "latest": self.latest,
        }

    def _optional(self) -> Iterator[tuple[str, Stateful | None]]:
        yield from (("scaler", self.scaler), ("callbacks", self.callbacks), ("algorithm", self.algorithm))

    def _gradients(self) -> dict[str, torch.Tensor]:
        named = self.module.named_parameters()
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}

    def template(self) -> dict[str, Any]:
        """Return `tree` with parameters in place of the optimizer state, which has the same sharding."""
        return {**self.tree(), "optimizers": [*map(optimizer_parameters, self.optimizers)]}

    def load(self, loaded: LoadedCheckpoint) -> None:
        tree = {**loaded.state}
        tree["module"] = match_names(tree["module"], self.module.state_dict())
        # An imported checkpoint has no sample order, so training starts a new order.
        if tree["plan"] is not None and tree["plan"] != self.source.identity():
            raise UserError(
                f"{loaded.path} was saved with {tree['plan']}, but this script uses "
                f"{self.source.identity()}. The order of samples depends on these values. Restore the old "
                "values, or start a new run in a new folder."
            )
        try:
            self.module.load_state_dict(tree["module"])
            _load_each("optimizer", self.optimizers, tree["optimizers"])
            if tree["optimizers"] is not None:
                self._restore_dtypes(tree)
            _load_each("scheduler", self.schedulers, tree["schedulers"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                f"{loaded.path} does not match {type(self.module).__name__} and its optimizers: "
                f"{str(error).rstrip('.')}. Restore the previous module and optimizers, or start a new "
                "run in a new folder."
            ) from error
        configured = tree.get("configured")
        self.ignored = ignored_values(self.optimizers, self.schedulers, self._script, configured)
        self._configured = configured or self._script
        for name, parameter in self.module.named_parameters():
            if (gradient := tree.get("gradients", {}).get(name)) is not None:
                parameter.grad = gradient.detach().clone().to(parameter.device)
        for name, target in self._optional():
            if target is not None and (state := tree.get(name)) is not None:
                target.load_state_dict(state)
        messages = self._load_determinism(tree.get("determinism"))
        self.loss_guard.load_state_dict(tree.get("loss_guard", {}))
        if tree["user"]:
            self.module.on_load_checkpoint(tree["user"])
        if tree["plan"] is not None:
            unrestored = self.source.load_state_dict(tree["position"])
            self.is_position_restored = not unrestored
            self.epoch = tree["epoch"]
            messages = [*messages, *unrestored]
        self.remarks = messages
        self.step = loaded.step
        # A state that was not verified before is the beginning of the verified steps.
        verified_step = self.step if loaded.verified_step is None else loaded.verified_step
        self.compared_step = None if self.compared_step is None else verified_step
        self.witnessed_step = None if self.witnessed_step is None else verified_step
        self.validated_step = tree["validated_step"]
        self.validation, self.latest = tree["validation"], tree["latest"]

    def _restore_dtypes(self, tree: dict[str, Any]) -> None:
        """Replace states that `load_state_dict` has converted to the type of their parameter."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        for optimizer, saved in zip(self.optimizers, tree["optimizers"], strict=True):
            for number, parameter in optimizer_parameters(optimizer)["state"].items():
                before = tree["module"].get(names.get(parameter))
                if before is None or before.dtype != parameter.dtype or parameter not in optimizer.state:
                    continue
                state = optimizer.state[parameter]
                for name, value in saved["state"].get(number, {}).items():
                    if isinstance(value, torch.Tensor) and state[name].dtype != value.dtype:
                        state[name] = value.detach().clone().to(state[name].device)

    def _load_determinism(self, state: dict[str, Any] | None) -> list[str]:
        if self.determinism is None:
            return []
        if state is None:
            self.determinism.exponents.clear()
            result = "so the result of its steps depends on the number of ranks"
            return [f"The checkpoint was saved without elastic_determinism, {result}."]
        return self.determinism.load_state_dict(state)


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the parameters of an optimizer, by their numbers in its `state_dict`."""
    groups = optimizer.param_groups
    return {"state": dict(enumerate(parameter for group in groups for parameter in group["params"]))}


def _load_each(kind: str, targets: Sequence[Stateful], states: Sequence[dict[str, Any]] | None) -> None:
    if states is None:
        return
    if len(targets) != len(states):
        raise ValueError(
            f"the checkpoint has {pluralize(len(states), kind)}, but the script has {len(targets)}"
        )
    for target, state in zip(targets, states, strict=True):
        if isinstance(target, torch.optim.Optimizer):
            check_optimizer_class(target, state)
        target.load_state_dict(state)
