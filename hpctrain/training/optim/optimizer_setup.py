"""Normalize and check the result of `configure_optimizers`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.training.module import Module

#: Keys of Lightning's scheduler dict, each with its only supported value.
_SCHEDULER_KEYS = {"interval": "step", "frequency": 1}


class LRScheduler(Protocol):
    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class OptimizerSetup:
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[LRScheduler, ...]


def configure_optimizers_of(module: Module) -> OptimizerSetup:
    origin = f"{type(module).__name__}.configure_optimizers()"
    result = module.configure_optimizers()
    lists = _parts(result)
    if lists is not None:
        optimizers, schedulers = (tuple(items) for items in lists)
        schedulers = tuple(_unwrapped(scheduler, origin) for scheduler in schedulers)
        are_optimizers = all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers)
        if any(isinstance(item, torch.optim.lr_scheduler.ReduceLROnPlateau) for item in schedulers):
            raise UserError(
                f"{origin} returned a ReduceLROnPlateau, which requires a metric. Schedulers advance after "
                "every optimizer step, without a metric. Do not return this scheduler. Instead, call its "
                "step() in the on_validation_end() of a callback, and save and restore its state in the "
                "callback's state_dict() and load_state_dict()."
            )
        if any(isinstance(item, torch.optim.LBFGS) for item in optimizers):
            raise UserError(
                f"{origin} returned an LBFGS optimizer, which is not supported because it recomputes the "
                "loss several times per step. Use another optimizer."
            )
        if optimizers and are_optimizers and all(hasattr(scheduler, "step") for scheduler in schedulers):
            _check_disjoint(optimizers, module, origin)
            return OptimizerSetup(optimizers, schedulers)
    raise UserError(
        f"{origin} returned {result!r}. It must return an optimizer, (optimizer, scheduler), "
        "{'optimizer': …, 'lr_scheduler': …}, several optimizers, or ([optimizers], [schedulers])."
    )


def check_trainable(module: Module, optimization: OptimizerSetup) -> None:
    trainable = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    optimized = {id(p) for optimizer in optimization.optimizers for p in parameters_of(optimizer)}
    if trainable and optimized and not trainable & optimized:
        raise UserError(
            f"{type(module).__name__}.configure_optimizers() returned optimizers without any of the "
            f"{len(trainable)} trainable parameters of the module, so nothing would be trained. Create the "
            "optimizers in this method, from self.parameters(). Do not replace layers afterwards, "
            "because new layers have new parameters."
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextlib.contextmanager
def only_trainable(module: nn.Module, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Enable gradients only for these parameters of `module` within the block."""
    ids = {id(parameter) for parameter in parameters}
    frozen = [p for p in module.parameters() if p.requires_grad and id(p) not in ids]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def _parts(result: Any) -> tuple[list[Any], list[Any]] | None:
    match result:
        case {"optimizer": optimizer, **rest} if set(rest) <= {"lr_scheduler"}:
            return [optimizer], [value for value in rest.values() if value is not None]
        case [list() | tuple() as optimizers, list() | tuple() as schedulers]:
            return list(optimizers), list(schedulers)
        case [torch.optim.Optimizer(), *others] if all(isinstance(o, torch.optim.Optimizer) for o in others):
            return list(result), []
        case [optimizer, scheduler]:
            return [optimizer], [] if scheduler is None else [scheduler]
        case torch.optim.Optimizer():
            return [result], []
    return None


def _unwrapped(scheduler: Any, origin: str) -> Any:
    if not isinstance(scheduler, Mapping) or "scheduler" not in scheduler:
        return scheduler
    for key, only in _SCHEDULER_KEYS.items():
        if (value := scheduler.get(key, only)) != only:
            raise UserError(
                f"{origin} returned a scheduler with {key}={value!r}. Schedulers advance once per "
                f"optimizer step, on any number of ranks. Set {key}={only!r} and count in steps."
            )
    return scheduler["scheduler"]


def _check_disjoint(optimizers: tuple[torch.optim.Optimizer, ...], module: Module, origin: str) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    owners: dict[int, int] = {}
    for i, optimizer in enumerate(optimizers):
        for parameter in parameters_of(optimizer):
            if owners.setdefault(id(parameter), i) != i:
                raise UserError(
                    f"{origin} assigns {names.get(id(parameter), 'a parameter')} to optimizers "
                    f"{owners[id(parameter)]} and {i}, so both would update it. Assign each parameter to a "
                    "single optimizer."
                )


def check_optimizer_class(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Check that a state belongs to this class of optimizer; other versions of torch may lack fields."""
    theirs = {name for group in state.get("param_groups", ()) for name in group}
    ours = {name for group in optimizer.param_groups for name in group}
    if (only_theirs := theirs - ours) and (only_ours := ours - theirs):
        raise ValueError(
            f"the optimizer in the checkpoint has the options {', '.join(sorted(only_theirs))}, but the "
            f"optimizer of the script has {', '.join(sorted(only_ours))} instead"
        )
