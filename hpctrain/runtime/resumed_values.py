"""Report values of optimizers and schedulers that a resumed run takes from its checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hpctrain.errors import UserError

#: State of torch's schedulers that changes during training.
_PROGRESS = {"last_epoch", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"}
#: Hyper-parameters that a scheduler may change at every step.
_SCHEDULED = {"lr", "momentum", "betas"}

#: Ratio of the lengths of training and schedule from which the difference is reported.
_TOLERANCE = 1.05
_REMEDY = (
    "Create the scheduler for the length of the training. In a resumed run, the checkpoint determines the "
    "length; only LambdaLR always uses the function of the script."
)
_EXTENSION_REMEDY = (
    "To extend the schedule, set its length in trainer.schedulers and the learning rate in "
    "trainer.optimizers, in the on_fit_start() of a callback, which runs after the checkpoint is loaded. "
    "Or use a LambdaLR, which always uses the function of the script."
)


class IgnoredValue(NamedTuple):
    name: str
    owner: str
    """Optimizer or scheduler, such as "CosineAnnealingLR"; empty for the only optimizer."""
    applied: Any
    script_value: Any

    @property
    def record(self) -> tuple[str, Any, Any]:
        return self.name, self.applied, self.script_value

    def __str__(self) -> str:
        of = self.owner and f" of {self.owner}"
        return (
            f"{self.name}{of} remains {self.applied!r}, the value in the checkpoint, although the script now "
            f"sets {self.script_value!r}."
        )


def configured_values(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> dict[str, Any]:
    """Return the values of newly created optimizers and schedulers, before training changes them."""
    return {
        "optimizers": [
            [
                {name: _plain(group[name]) for name in group if name != "params"}
                for group in optimizer.param_groups
            ]
            for optimizer in optimizers
        ],
        "schedulers": [dict(_scheduler_values(scheduler.state_dict())) for scheduler in schedulers],
    }


def ignored_values(
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    script: Mapping[str, Any],
    configured: Mapping[str, Any] | None,
) -> list[IgnoredValue]:
    """Return the script's values that differ from those just loaded, unless only training changed them."""
    ignored: dict[IgnoredValue, None] = {}
    loaded, original = configured_values(optimizers, schedulers), configured or {}
    for number, groups in enumerate(zip(script["optimizers"], loaded["optimizers"], strict=True)):
        owner = f"optimizer {number}" if len(optimizers) > 1 else ""
        original_groups = _item(original.get("optimizers"), number)
        for index, (new, old) in enumerate(zip(*groups, strict=False)):
            original_group = _item(original_groups, index)
            # A scheduler stores the configured rate as `initial_lr`.
            is_scheduled = "initial_lr" in new and "initial_lr" in old
            for name, value in new.items():
                if is_scheduled and (name == "lr" or (original_group is None and name in _SCHEDULED)):
                    continue
                if _differs(value, name, old, original_group):
                    shown = "lr" if name == "initial_lr" else name
                    ignored[IgnoredValue(shown, owner, old[name], value)] = None
    for number, (scheduler, new, old) in enumerate(
        zip(schedulers, script["schedulers"], loaded["schedulers"], strict=True)
    ):
        original_values, kind = _item(original.get("schedulers"), number), type(inner_scheduler(scheduler))
        is_torch = kind.__module__ == torch.optim.lr_scheduler.__name__
        for name, value in new.items():
            shown = name.rpartition(".")[2].removeprefix("_")
            is_constant = original_values is not None or (is_torch and shown not in _PROGRESS)
            if is_constant and _differs(value, name, old, original_values):
                ignored[IgnoredValue(shown, kind.__name__, old[name], value)] = None
    return list(ignored)


def advance_period(
    interval: str, frequency: int, needs_metric: bool, steps_per_epoch: int | None
) -> int | None:
    """Return the optimizer steps from one advance of a schedule of Lightning to the next; None if unknown."""
    steps = steps_per_epoch if interval == "epoch" else 1
    return None if needs_metric or steps is None else steps * frequency


def check_ends(
    schedules: Iterable[tuple[Any, int | None]],
    last_step: int,
    ignored: Sequence[IgnoredValue],
    *,
    can_change: bool,
) -> list[str]:
    """Return messages on schedules that end before training does.

    Raises:
        UserError: a schedule cannot continue, or callbacks did not apply the longer one of the script.
    """
    messages = []
    for scheduler, period in schedules:
        end = _end(scheduler)
        if period is None or end is None or end[1] * period >= last_step:
            continue
        name, kind, source = end[0], type(scheduler).__name__, ""
        for value in ignored:
            if (value.name, value.owner) == (name, kind):
                source = f", the value in the checkpoint; the script sets {value.script_value!r}"
        sentence = (
            f"{kind} ends after step {end[1] * period} ({name}={end[1]}{source}), but training ends after "
            f"step {last_step}."
        )
        if isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR):
            raise UserError(f"{sentence} OneCycleLR refuses further steps. {_REMEDY}")
        if source and can_change:
            raise UserError(f"{sentence} {_EXTENSION_REMEDY}")
        if end[1] * period * _TOLERANCE < last_step:
            advance = "step" if period == 1 else f"{period} steps"
            messages.append(f"{sentence} It advances once per {advance}. {_REMEDY}")
    return messages


def _end(scheduler: Any) -> tuple[str, int] | None:
    """Return the name and value of the number of steps after which a schedule ends; None if it has no end."""
    lr_scheduler = torch.optim.lr_scheduler
    match scheduler:
        case lr_scheduler.OneCycleLR():
            return "total_steps", scheduler.total_steps
        case lr_scheduler.CosineAnnealingLR():
            return "T_max", scheduler.T_max
        case lr_scheduler.PolynomialLR():
            return "total_iters", scheduler.total_iters
        case lr_scheduler.SequentialLR():
            final = _end(scheduler._schedulers[-1])
            return final and (final[0], scheduler._milestones[-1] + final[1])
        case lr_scheduler.ChainedScheduler():
            return min(filter(None, map(_end, scheduler._schedulers)), key=lambda end: end[1], default=None)
        case lr_scheduler.LambdaLR():  # of Transformers
            for function in scheduler.lr_lambdas:
                steps = getattr(function, "keywords", {}).get("num_training_steps")
                if isinstance(steps, int):
                    return "num_training_steps", steps
    return None


def inner_scheduler(scheduler: Any) -> Any:
    return getattr(scheduler, "scheduler", scheduler)


def _differs(value: Any, name: str, old: Mapping[str, Any], original: Mapping[str, Any] | None) -> bool:
    # Checkpoints may contain lists for tuples.
    return name in old and value != old[name] and (original is None or value != _plain(original.get(name)))


def _item(values: Sequence[Any] | None, number: int) -> Any:
    return None if values is None or number >= len(values) else values[number]


def _scheduler_values(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if name == "_schedulers" and isinstance(value, (list, tuple)):
            for number, inner in enumerate(value):
                yield from _scheduler_values(inner, f"{prefix}{number}.")
        elif name == "_milestones" or not (str(name).startswith("_") or name == "base_lrs"):
            if isinstance(value, Mapping):  # the milestones of MultiStepLR
                value = sorted(value.elements()) if isinstance(value, Counter) else None
            if (plain := _plain(value)) is not None:
                yield f"{prefix}{name}", plain


def _plain(value: Any) -> Any:
    """Return a number, a string or a tuple of these; None for other values."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (bool, int, float, str)) else None
