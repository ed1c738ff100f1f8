"""In which number format the forward pass computes."""

from __future__ import annotations

import contextlib

import torch

from hpctrain.errors import UserError

PRECISIONS = ("32", "bf16-mixed")


def check_precision(precision: str) -> str:
    """`precision`, if it is one that hpctrain knows.

    Raises:
        UserError: it is not.
    """
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}; known are {', '.join(map(repr, PRECISIONS))}.")
    return precision


def forward_context(precision: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The context of a forward pass: autocast to bfloat16 for `bf16-mixed`; weights stay float32."""
    if precision == "bf16-mixed":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()
