"""Change the tensors of a batch, choose their number format, and access sharded ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hpctrain.errors import UserError
from hpctrain.torch_compat import pytree

T = TypeVar("T", bound=torch.Tensor)

#: Bytes. Some kernels for CPUs depend on the alignment of a tensor.
_ALIGNMENT = 64
_AUTOCAST = {"32": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "bf16-true": None}
_ALIASES = {"fp32": "32", "32-true": "32", "16": "16-mixed", "fp16": "16-mixed", "bf16": "bf16-mixed"}
#: Precision names of NVIDIA apex.
_APEX = ("apex", "amp", "O0", "O1", "O2", "O3")


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


def align_tensors(batch: Any) -> Any:
    """Copy the tensors of a batch whose addresses are not multiples of 64 bytes."""

    def align(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.is_cpu and tensor.data_ptr() % _ALIGNMENT else tensor

    return map_tensors(batch, align)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; the tensor itself if it is not a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(
        isinstance(placement, Shard) for placement in tensor.placements
    )


def slice_batch(batch: Any, num_samples: int, low: int, high: int) -> Any:
    """Return samples `low` to `high` of a batch; leaves without a sample dimension are unchanged."""

    def is_column(node: Any) -> bool:
        return (
            isinstance(node, (list, tuple))
            and len(node) == num_samples
            and not any(isinstance(value, (torch.Tensor, dict, list, tuple)) for value in node)
        )

    def cut(leaf: Any) -> Any:
        counts = (
            leaf.ndim > 0 and len(leaf) == num_samples if isinstance(leaf, torch.Tensor) else is_column(leaf)
        )
        return leaf[low:high] if counts else leaf

    return pytree.tree_map(cut, batch, is_leaf=is_column)


def group_by_type(tensors: Iterable[T]) -> list[list[T]]:
    groups: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def canonical_precision(precision: str | int) -> str:
    precision = _ALIASES.get(str(precision), str(precision))
    if precision in _APEX:
        raise UserError(
            f"precision is {precision!r}, which is an Apex mode. Use PyTorch's built-in mixed precision "
            "instead: '16-mixed', or 'bf16-mixed' on GPUs that support bfloat16."
        )
    if precision not in _AUTOCAST:
        raise UserError(f"precision is {precision!r}, but must be one of {', '.join(map(repr, _AUTOCAST))}.")
    return precision


def cast_module(module: nn.Module, precision: str) -> None:
    if precision == "bf16-true":
        module.to(torch.bfloat16)


def cast_batch(batch: Any, precision: str) -> Any:
    if precision != "bf16-true":
        return batch
    return map_tensors(batch, lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor)


def forward_context(precision: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    dtype = _AUTOCAST[precision]
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def make_scaler(
    precision: str, device: torch.device, *, has_shards: bool = False
) -> torch.amp.GradScaler | None:
    """Return the loss scaler of `16-mixed`; if each rank has only shards of gradients, it asks the others."""
    if precision != "16-mixed":
        return None
    if not has_shards:
        return torch.amp.GradScaler(device.type)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(device.type)
