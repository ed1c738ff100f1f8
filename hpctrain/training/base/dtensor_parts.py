"""Parts of tensors that may be sharded over the ranks."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; the tensor itself if it is not a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return true if the ranks have different parts of a tensor."""
    return isinstance(tensor, DTensor) and any(isinstance(each, Shard) for each in tensor.placements)
