"""Search the variables of a script for training state that its checkpoints do not contain."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
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
#: Methods that save a number, or set it at the start.
_HANDLING = ("on_fit_start", "on_train_start", "setup", "state_dict", "on_save_checkpoint")
#: Names in statements that measure, and so do not change what is trained.
_MEASURES = re.compile(
    r"(?<![a-z])time(?![a-z])|perf_counter|monotonic|elapsed|seconds|duration|clock|memory|cache|hits|misses"
)


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
    return any(method in vars(kind) for method in methods for kind in _user_classes(value))


def _user_classes(value: object) -> list[type]:
    return [kind for kind in type(value).__mro__ if not kind.__module__.startswith(_LIBRARIES)]


class UnsavedNumbers:
    """Numbers in attributes of modules and callbacks that training counts, but checkpoints lack."""

    def __init__(self, modules: Iterable[nn.Module], callbacks: Iterable[object] = ()) -> None:
        modules, callbacks = list(modules), list(callbacks)
        methods = (
            vars(kind).get(name)
            for value in [*modules, *callbacks]
            for kind in _user_classes(value)
            for name in _HANDLING
        )
        self._handled = {
            name for method in methods if inspect.isfunction(method) for name in method.__code__.co_names
        }
        hosts: list[object] = []
        for module in modules:
            if overrides_any(module, ("on_save_checkpoint", "state_dict")) or module._state_dict_hooks:
                continue
            saved = ("state_dict", "get_extra_state", "_save_to_state_dict")
            hosts += [layer for layer in module.modules() if not overrides_any(layer, saved)]
        hosts += [callback for callback in callbacks if not overrides_any(callback, ["state_dict"])]
        self._before = [(host, _numbers(host)) for host in hosts]

    def remark(self) -> str | None:
        names = {
            f"{kinds[0].__name__}.{name}": None
            for host, before in self._before
            for name, value in _numbers(host).items()
            if name not in self._handled
            and before.get(name, getattr(type(host), name, value)) != value
            and _is_counted(kinds := _user_classes(host), name)
        }
        if not names:
            return None
        return (
            "Training has changed these numbers, which the checkpoints do not contain, so a resumed run "
            f"starts them anew: {', '.join(names)}. Register a number of a module with register_buffer(), or "
            "save it in on_save_checkpoint(). Save those of a callback in its state_dict()."
        )


def _numbers(host: object) -> dict[str, int | float]:
    return {name: value for name, value in vars(host).items() if type(value) in (int, float)}


def _is_counted(kinds: Iterable[type], name: str) -> bool:
    """Return true if a method computes the number from its earlier value, and measures no time or memory."""
    counts = re.compile(rf"\w+\.{name} (\S+= |= .*\.{name}\b)")
    for function in (value for kind in kinds for value in vars(kind).values() if inspect.isfunction(value)):
        code = inspect.unwrap(function).__code__
        if name not in code.co_names or code.co_name == "__init__" or "site-packages" in code.co_filename:
            continue
        with suppress(OSError, SyntaxError):  # no source, or not that of a statement
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
                statement = ast.unparse(node) if isinstance(node, (ast.Assign, ast.AugAssign)) else ""
                if counts.match(statement) and not _MEASURES.search(statement):
                    return True
    return False


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
