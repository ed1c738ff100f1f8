"""Splitting of a nested state into tensors and plain values, which are stored as JSON.

Nothing is pickled. A save rejects a value that JSON cannot represent exactly, and names its path. Floats are
exact, because JSON stores the shortest decimal representation that yields the same number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from hpctrain.errors import CheckpointError

#: Key prefix for the tensors of the state; `rank_key` returns the prefix for the rank's own tensors.
STATE_KEY = "state"

_TENSOR, _TUPLE, _ITEMS, _COUNTER = "$tensor", "$tuple", "$items", "$counter"


def rank_key(rank: int) -> str:
    return f"rank-{rank:05d}/"


def split_tree(tree: Any, path: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the tree with a reference in place of each tensor, and the tensors by path."""
    tensors: dict[str, torch.Tensor] = {}
    return _split(tree, path, tensors), tensors


def _split(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        while path in tensors:  # {"a/b": …, "a": {"b": …}}, or the keys 1 and "1"
            path += "+"
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Counter):  # MultiStepLR requires this type for its milestones
        return {_COUNTER: _split(dict(value), path, tensors)}
    if isinstance(value, Mapping):
        items = [(key, _split(item, f"{path}/{key}", tensors)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {_ITEMS: [[_split(key, f"{path}/key", tensors), item] for key, item in items]}
    if isinstance(value, (list, tuple)):
        elements = [_split(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return {_TUPLE: elements} if isinstance(value, tuple) else elements
    raise CheckpointError(
        f"{path} has type {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
        "store. Save only tensors, numbers, strings, None, and lists, tuples and dicts of these."
    )


def join_tree(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(plain, list):
        return [join_tree(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if _TENSOR in plain:
        return tensors[plain[_TENSOR]]
    if _COUNTER in plain:
        return Counter(join_tree(plain[_COUNTER], tensors))
    if _TUPLE in plain:
        return tuple(join_tree(item, tensors) for item in plain[_TUPLE])
    if _ITEMS in plain:
        return {join_tree(key, tensors): join_tree(item, tensors) for key, item in plain[_ITEMS]}
    return {key: join_tree(item, tensors) for key, item in plain.items()}
