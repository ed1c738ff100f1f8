"""A module whose steps `torch.compile` has translated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hpctrain.training.module import Module

#: What is called once for every batch.
_STEPS = ("training_step", "validation_step")


@contextlib.contextmanager
def compiled(module: Module, options: bool | Mapping[str, Any]) -> Iterator[None]:
    """Translate the steps of `module` when they are first called, for the block.

    Args:
        module: what is trained.
        options: True, or arguments of `torch.compile`; False leaves the module alone.
    """
    if options is False:
        yield
        return
    words: dict[str, Any] = {} if options is True else dict(options)
    for name in _STEPS:
        setattr(module, name, torch.compile(getattr(module, name), **words))
    try:
        yield
    finally:
        for name in _STEPS:
            delattr(module, name)
