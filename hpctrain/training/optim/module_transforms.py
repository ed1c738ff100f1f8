"""Recompute activations, and compile steps, while a module is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpctrain.errors import UserError
from hpctrain.torch_compat import NormBase
from hpctrain.training.module import Module


@contextlib.contextmanager
def activation_checkpointing(module: nn.Module, patterns: Sequence[str]) -> Iterator[None]:
    """Store only the inputs of the submodules that match `patterns`, within the block."""
    chosen = _chosen(module, patterns)
    for submodule in chosen.values():
        submodule.forward = partial(_recompute, submodule, submodule.forward)
    try:
        yield
    finally:
        for submodule in chosen.values():
            del submodule.forward


def _recompute(submodule: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(
        inner,
        *args,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), _preserve_statistics(submodule)),
        **kwargs,
    )


@contextlib.contextmanager
def _preserve_statistics(submodule: nn.Module) -> Iterator[None]:
    """Let batch norm update copies of its running statistics within the block."""
    layers = [layer for layer in submodule.modules() if isinstance(layer, NormBase) and layer.training]
    statistics = [dict(layer._buffers) for layer in layers]
    for layer, buffers in zip(layers, statistics, strict=True):
        layer._buffers.update({n: None if b is None else b.clone() for n, b in buffers.items()})
    try:
        yield
    finally:
        for layer, buffers in zip(layers, statistics, strict=True):
            layer._buffers.update(buffers)


def _chosen(module: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    named = {name: submodule for name, submodule in module.named_modules() if name}
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        names = [name for name in named if _matches(name.split("."), pattern.split("."))]
        if not names:
            raise UserError(
                f"recompute contains {pattern!r}, but no submodule of {type(module).__name__} matches this "
                f"pattern. The submodules include {', '.join(map(repr, list(named)[:20]))}."
            )
        chosen |= {name: named[name] for name in names}
    for name in chosen:
        parents = [parent for parent in chosen if name.startswith(f"{parent}.")]
        if parents:
            raise UserError(
                f"recompute matches both {parents[0]!r} and its submodule {name!r}. Choose only one of them."
            )
    return chosen


def _matches(segments: list[str], patterns: list[str]) -> bool:
    return len(segments) == len(patterns) and all(map(fnmatchcase, segments, patterns))


#: Methods that are called once per batch.
_STEPS = ("training_step", "validation_step")


@contextlib.contextmanager
def compile_steps(module: Module, options: bool | Mapping[str, Any]) -> Iterator[None]:
    if options is False:
        yield
        return
    arguments: dict[str, Any] = {} if options is True else dict(options)
    for name in _STEPS:
        step = getattr(module, name)
        if isinstance(step, MethodType) and step.__self__ is module:
            # `dp` calls the same compiled function with copies of the module.
            setattr(module, name, partial(torch.compile(step.__func__, **arguments), module))
        else:
            setattr(module, name, torch.compile(step, **arguments))
    try:
        yield
    finally:
        for name in _STEPS:
            delattr(module, name)
