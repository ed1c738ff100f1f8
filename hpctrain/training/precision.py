"""In which number format the forward pass computes, and what float16 needs for its gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.training.data.loading import with_tensors

_AUTOCAST = {"32": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "bf16-true": None}
PRECISIONS = tuple(_AUTOCAST)
#: What NVIDIA's apex called its levels, and what users ask for in its name.
_APEX = ("apex", "amp", "O0", "O1", "O2", "O3")


def check_precision(precision: str) -> str:
    """`precision`, if it is one that hpctrain knows.

    Raises:
        UserError: it is not.
    """
    if precision in _APEX:
        raise UserError(
            f"precision is {precision!r}, which is a word of apex. PyTorch does natively what apex did: take "
            "'16-mixed', or 'bf16-mixed' on GPUs that compute in bfloat16."
        )
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}; known are {', '.join(map(repr, PRECISIONS))}.")
    return precision


def in_precision(module: nn.Module, precision: str) -> None:
    """Give the weights and buffers of `module` the type that they are trained in."""
    if precision == "bf16-true":
        module.to(torch.bfloat16)


def changes_batches(precision: str) -> bool:
    """Whether `batch_in_precision` does something."""
    return precision == "bf16-true"


def batch_in_precision(batch: Any, precision: str) -> Any:
    """`batch` with its floating-point tensors in the type of the weights, where these are not in float32."""
    if not changes_batches(precision):
        return batch
    return with_tensors(batch, lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor)


def forward_context(precision: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The context of a forward pass: autocast for the mixed precisions, whose weights stay float32."""
    dtype = _AUTOCAST[precision]
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def make_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """What scales the loss of `16-mixed`, so that small gradients do not vanish in float16; None otherwise.

    A step whose gradients overflow is skipped and the scale lowered. All ranks do so alike: they look at the
    gradients after these were averaged, and an infinity on one rank is then one on all.
    """
    return torch.amp.GradScaler(device.type) if precision == "16-mixed" else None
