"""Buffers of a module, such as running means, which every rank has."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def share_buffers(module: nn.Module) -> None:
    """Give every rank the buffers of rank 0, those of a kind in one message. All ranks must call this."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for buffer in module.buffers():
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad():
        for buffers in kinds.values():
            together = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(together, src=0)
            news = torch.split(together, [buffer.numel() for buffer in buffers])
            for buffer, values in zip(buffers, news, strict=True):
                buffer.copy_(values.view_as(buffer))
