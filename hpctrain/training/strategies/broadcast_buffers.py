"""Broadcast of a module's parameters, and of its buffers, such as running means."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


def broadcast_buffers(module: nn.Module) -> None:
    """Broadcast rank 0's buffers. All ranks must call this."""
    broadcast_tensors(module.buffers())


def broadcast_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Broadcast rank 0's values of `tensors`, one message per dtype and device. All ranks must call this."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for alike in kinds.values():
            together = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.broadcast(together, src=0)
            parts = torch.split(together, [tensor.numel() for tensor in alike])
            for tensor, values in zip(alike, parts, strict=True):
                tensor.copy_(values.view_as(tensor))
