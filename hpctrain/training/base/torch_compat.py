"""PyTorch APIs that newer versions rename, with a warning for the old name."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

#: Gathers all ranks' tensors into one; named `all_gather_into_tensor` before torch 2.13.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_SHARES_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


def buffer_broadcast_kwargs(shares: bool) -> dict[str, Any]:
    """Return DistributedDataParallel's argument for the broadcast of rank 0's buffers in the forward pass."""
    return {_SHARES_BUFFERS: shares}
