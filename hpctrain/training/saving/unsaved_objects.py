"""Search for training state in the variables of a script that its checkpoints do not contain."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from hpctrain.training.data.stateful_batch_sampler import StatefulBatchSampler

#: Packages with base classes of the user's classes.
_LIBRARIES = ("hpctrain.", "lightning.", "pytorch_lightning.", "torch.", "builtins")
#: Remedy for scripts whose optimizers belong to a trainer.
TRAINER_REMEDY = (
    "Return schedulers from configure_optimizers(). Assign averaged models to the module, or save them in "
    "the state_dict() of a callback."
)
#: Depth to which the attributes of saved objects are searched.
_DEPTH = 3


def remark_on_unsaved(saved: Iterable[object], remedy: str, *, steps_by_script: bool = True) -> str | None:
    saved_ids: set[int] = set()
    for value in saved:
        _add(saved_ids, value, _DEPTH)
    unsaved: dict[int, str] = {}
    contained: set[int] = set()
    for name, value in _variables(sys._getframe(1)):
        kind = type(value)
        if id(value) in saved_ids or id(value) in unsaved:
            continue
        if issubclass(kind, LRScheduler):
            is_state = id(getattr(value, "optimizer", None)) in saved_ids
        elif issubclass(kind, torch.amp.GradScaler):
            is_state = steps_by_script and value.is_enabled()
        elif issubclass(kind, (torch.optim.Optimizer, StatefulBatchSampler)):
            is_state = steps_by_script
        else:
            is_state = issubclass(kind, AveragedModel)
        if is_state:
            unsaved[id(value)] = f"{name} ({kind.__name__})"
            contained.update(map(id, getattr(value, "_schedulers", ())))
    names = [name for number, name in unsaved.items() if number not in contained]
    if not names:
        return None
    return (
        "The checkpoints do not contain these objects, so a resumed run starts them anew: "
        f"{', '.join(names)}. {remedy}"
    )


def overrides_any(value: object, methods: Iterable[str]) -> bool:
    """Return true if a class of the user, not of a library, defines one of the methods of `value`."""
    kinds = [kind for kind in type(value).__mro__ if not kind.__module__.startswith(_LIBRARIES)]
    return any(method in vars(kind) for method in methods for kind in kinds)


def _add(saved_ids: set[int], value: Any, depth: int) -> None:
    if value is None or depth < 0 or isinstance(value, (torch.Tensor, ModuleType, type, str, int, float)):
        return
    saved_ids.add(id(value))
    if isinstance(value, nn.Module):
        saved_ids.update(map(id, value.modules()))
    elif isinstance(value, (torch.optim.Optimizer, LRScheduler)):
        # Schedulers that contain others, and wrappers of Accelerate.
        for content in (getattr(value, "optimizer", None), *getattr(value, "_schedulers", ())):
            _add(saved_ids, content, depth - 1)
    elif isinstance(value, (Mapping, list, tuple)):
        for content in value.values() if isinstance(value, Mapping) else value:
            _add(saved_ids, content, depth - 1)
    elif hasattr(value, "__dict__"):
        _add(saved_ids, vars(value), depth - 1)


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if not (module.startswith("hpctrain.") or "site-packages" in frame.f_code.co_filename):
            for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
                yield name, value
                for attribute, inner in _attributes(value):
                    yield f"{name}.{attribute}", inner
        frame = frame.f_back


def _attributes(value: Any) -> list[tuple[str, Any]]:
    kind = type(value)
    if issubclass(kind, (ModuleType, type)) or kind.__module__.startswith("torch."):
        return []
    with suppress(AttributeError):
        return [*object.__getattribute__(value, "__dict__").items()]
    return []
