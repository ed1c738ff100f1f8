"""Compilation of a module's steps with `torch.compile`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch

from hpctrain.training.module import Module

#: Methods that are called once per batch.
_STEPS = ("training_step", "validation_step")


@contextlib.contextmanager
def compile_steps(module: Module, options: bool | Mapping[str, Any]) -> Iterator[None]:
    """Compile the steps of `module` on their first call within the block.

    Args:
        module: the module to train.
        options: True, or arguments of `torch.compile`; False leaves the module unchanged.
    """
    if options is False:
        yield
        return
    words: dict[str, Any] = {} if options is True else dict(options)
    for name in _STEPS:
        step = getattr(module, name)
        if isinstance(step, MethodType) and step.__self__ is module:
            # `dp` calls the same compiled function with copies of the module.
            setattr(module, name, partial(torch.compile(step.__func__, **words), module))
        else:
            setattr(module, name, torch.compile(step, **words))
    try:
        yield
    finally:
        for name in _STEPS:
            delattr(module, name)
