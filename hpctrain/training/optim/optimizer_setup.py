"""Normalized result of `configure_optimizers`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.training.module import Module

#: Keys of Lightning's scheduler dict, each with its only supported value.
_SCHEDULER_KEYS = {"interval": "step", "frequency": 1}


class LRScheduler(Protocol):
    """A learning-rate schedule, as in `torch.optim.lr_scheduler`; stepped after every optimizer step."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class OptimizerSetup:
    """Optimizers with disjoint parameters, and their learning-rate schedules."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[LRScheduler, ...]


def configure_optimizers_of(module: Module) -> OptimizerSetup:
    """Return the optimizers and schedulers of `module`.

    Raises:
        UserError: the result has another form, a parameter belongs to two optimizers, or a scheduler is not
            stepped after each step.
    """
    origin = f"{type(module).__name__}.configure_optimizers()"
    answer = module.configure_optimizers()
    parts = _parts(answer)
    if parts is not None:
        optimizers, schedulers = (tuple(part) for part in parts)
        schedulers = tuple(_unwrapped(scheduler, origin) for scheduler in schedulers)
        are_optimizers = all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers)
        if any(isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau) for each in schedulers):
            raise UserError(
                f"{origin} returned a ReduceLROnPlateau, which needs a metric; schedulers here step after "
                "every optimizer step, without one. Call its step() yourself in a callback's "
                "on_validation_end, and save it in that callback's state_dict() and load_state_dict()."
            )
        if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
            raise UserError(
                f"{origin} returned an LBFGS, which recomputes the loss several times per step; this is not "
                "supported. Use another optimizer."
            )
        if optimizers and are_optimizers and all(hasattr(scheduler, "step") for scheduler in schedulers):
            _check_disjoint(optimizers, module, origin)
            return OptimizerSetup(optimizers, schedulers)
    raise UserError(
        f"{origin} returned {answer!r}. It must return an optimizer, (optimizer, scheduler), "
        "{'optimizer': …, 'lr_scheduler': …}, several optimizers, or ([optimizers], [schedulers])."
    )


def check_trainable(module: Module, optimization: OptimizerSetup) -> None:
    """Check that the optimizers update parameters of `module`.

    Raises:
        UserError: they have other parameters only.
    """
    own = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    given = {id(parameter) for optimizer in optimization.optimizers for parameter in parameters_of(optimizer)}
    if own and given and not own & given:
        raise UserError(
            f"{type(module).__name__}.configure_optimizers() returned optimizers with none of the module's "
            f"{len(own)} trainable parameters, so nothing would be trained. Create them from "
            "self.parameters() inside the method: layers replaced later have other parameters."
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextlib.contextmanager
def only_trainable(module: nn.Module, own: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let only the parameters `own` of `module` take gradients within the block.

    For example, the critic of a GAN then passes a gradient to the generator, but keeps none itself.
    """
    kept = {id(parameter) for parameter in own}
    others = [p for p in module.parameters() if p.requires_grad and id(p) not in kept]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def _parts(answer: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the unchecked optimizers and schedulers in `answer`; None if it has another form."""
    match answer:
        case {"optimizer": optimizer, **rest} if set(rest) <= {"lr_scheduler"}:
            return [optimizer], _as_list(rest.get("lr_scheduler"))
        case [list() | tuple() as optimizers, list() | tuple() as schedulers]:
            return list(optimizers), list(schedulers)
        case [torch.optim.Optimizer(), *others] if all(isinstance(o, torch.optim.Optimizer) for o in others):
            return list(answer), []
        case [optimizer, scheduler]:
            return [optimizer], _as_list(scheduler)
        case torch.optim.Optimizer():
            return [answer], []
    return None


def _as_list(scheduler: Any) -> list[Any]:
    return [] if scheduler is None else [scheduler]


def _unwrapped(scheduler: Any, origin: str) -> Any:
    """Return the scheduler, taken out of Lightning's dict if necessary."""
    if not isinstance(scheduler, Mapping) or "scheduler" not in scheduler:
        return scheduler
    for key, only in _SCHEDULER_KEYS.items():
        if (value := scheduler.get(key, only)) != only:
            raise UserError(
                f"{origin} returned a scheduler with {key}={value!r}. Schedulers advance once per optimizer "
                f"step, on any number of ranks: set {key}={only!r} and count in steps."
            )
    return scheduler["scheduler"]


def _check_disjoint(optimizers: tuple[torch.optim.Optimizer, ...], module: Module, origin: str) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: dict[int, int] = {}
    for i, optimizer in enumerate(optimizers):
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if seen.setdefault(id(parameter), i) != i:
                raise UserError(
                    f"{origin} assigns {names.get(id(parameter), 'a parameter')} to optimizer "
                    f"{seen[id(parameter)]} and to optimizer {i}; both would update it. Assign it to one of "
                    "them."
                )


def ignored_hyperparameters(
    optimizers: Sequence[torch.optim.Optimizer], states: Sequence[Any] | None
) -> list[str]:
    """Return sentences on hyper-parameters that differ from the checkpoint, whose values apply.

    Args:
        optimizers: as the script made them; call this before their states are loaded.
        states: their states in the checkpoint; None if it has none.
    """
    found: dict[str, None] = {}
    for number, (optimizer, state) in enumerate(zip(optimizers, states or (), strict=False)):
        groups = state.get("param_groups", ()) if isinstance(state, Mapping) else ()
        for new, old in zip(optimizer.param_groups, groups, strict=False):
            for name, saved, asked in _differences(new, old):
                which = f" of optimizer {number}" if len(optimizers) > 1 else ""
                found[
                    f"{name}{which} stays {saved!r}, the value in the checkpoint, although the script now "
                    f"sets {asked!r}. To change it in a resumed run, set it after the checkpoint is loaded, "
                    "in a callback's on_fit_start."
                ] = None
    return list(found)


def check_optimizer_class(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Check that a state belongs to this class of optimizer; another version of torch may lack a field.

    Raises:
        ValueError: it belongs to another class.
    """
    theirs = {name for group in state.get("param_groups", ()) for name in group}
    ours = {name for group in optimizer.param_groups for name in group}
    if (more := theirs - ours) and (less := ours - theirs):
        raise ValueError(
            f"its optimizer has {', '.join(sorted(more))}, the script's has {', '.join(sorted(less))}."
        )


def _differences(new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    # A scheduler changes the rate at every step, and keeps the configured one as `initial_lr`.
    scheduled = "initial_lr" in new and "initial_lr" in old
    for name in new:
        if name == "params" or name not in old or (scheduled and name == "lr"):
            continue
        saved, asked = _plain(old[name]), _plain(new[name])
        if saved != asked:
            yield "lr" if name == "initial_lr" else name, saved, asked


def _plain(value: Any) -> Any:
    """Convert tensors and sequences to lists or tuples that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value
