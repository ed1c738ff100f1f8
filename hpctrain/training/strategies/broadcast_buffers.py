"""Broadcast of a module's buffers, such as running means."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def broadcast_buffers(module: nn.Module) -> None:
    """Broadcast rank 0's buffers, one message per dtype and device. All ranks must call this."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for buffer in module.buffers():
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad():
        for buffers in kinds.values():
            together = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(together, src=0)
            parts = torch.split(together, [buffer.numel() for buffer in buffers])
            for buffer, values in zip(buffers, parts, strict=True):
                buffer.copy_(values.view_as(buffer))
