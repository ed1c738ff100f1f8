"""In which number format the forward pass computes, and what float16 needs for its gradients."""

from __future__ import annotations

import contextlib

import torch

from hpctrain.errors import UserError

_AUTOCAST = {"32": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
PRECISIONS = tuple(_AUTOCAST)


def check_precision(precision: str) -> str:
    """`precision`, if it is one that hpctrain knows.

    Raises:
        UserError: it is not.
    """
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}; known are {', '.join(map(repr, PRECISIONS))}.")
    return precision


def forward_context(precision: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The context of a forward pass: autocast for the mixed precisions; weights stay float32."""
    dtype = _AUTOCAST[precision]
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def make_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """What scales the loss of `16-mixed`, so that small gradients do not vanish in float16; None otherwise.

    A step whose gradients overflow is skipped and the scale lowered. All ranks do so alike: they look at the
    gradients after these were averaged, and an infinity on one rank is then one on all.
    """
    return torch.amp.GradScaler(device.type) if precision == "16-mixed" else None
