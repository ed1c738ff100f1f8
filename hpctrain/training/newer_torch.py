"""What newer versions of PyTorch call otherwise, and warn about under its older name."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

#: All ranks' tensors in one, for which `all_gather_into_tensor` is the older name (before torch 2.13).
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_SHARES_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


def sharing_buffers(shares: bool) -> dict[str, Any]:
    """The argument of DistributedDataParallel that says whether a forward pass shares rank 0's buffers."""
    return {_SHARES_BUFFERS: shares}
