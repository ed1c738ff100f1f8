"""Number format of the forward pass, and loss scaling for float16."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.training.base.tensors import map_tensors

_AUTOCAST = {"32": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "bf16-true": None}
PRECISIONS = tuple(_AUTOCAST)
_ALIASES = {"fp32": "32", "32-true": "32", "16": "16-mixed", "fp16": "16-mixed", "bf16": "bf16-mixed"}
#: Precision names of NVIDIA apex.
_APEX = ("apex", "amp", "O0", "O1", "O2", "O3")


def canonical_precision(precision: str | int) -> str:
    precision = _ALIASES.get(str(precision), str(precision))
    if precision in _APEX:
        raise UserError(
            f"precision is {precision!r}, which is an Apex mode. Use PyTorch's built-in mixed precision "
            "instead: '16-mixed', or 'bf16-mixed' on GPUs that support bfloat16."
        )
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}, but must be one of {', '.join(map(repr, PRECISIONS))}.")
    return precision


def cast_module(module: nn.Module, precision: str) -> None:
    if precision == "bf16-true":
        module.to(torch.bfloat16)


def casts_batches(precision: str) -> bool:
    return precision == "bf16-true"


def cast_batch(batch: Any, precision: str) -> Any:
    if not casts_batches(precision):
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
