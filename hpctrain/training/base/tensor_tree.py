"""Tensors in the nested tuples, lists and dicts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `batch` with `change` applied to every tensor in its tuples, lists and dicts."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch
