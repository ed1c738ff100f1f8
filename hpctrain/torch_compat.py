"""Import parts of torch that are private, or have different names in some versions, for several modules.

`tests/test_torch_compat.py` checks them against the installed version.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint.filesystem as dcp_filesystem
from torch.distributed._composable_state import _module_state_mapping as fsdp_states
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.storage import StorageReader
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.data._utils import worker as dataloader_worker
from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator

__all__ = [
    "DCP_VERSION",
    "FSDP_ATTRIBUTES",
    "BatchNorm",
    "DataLoaderIterator",
    "NormBase",
    "ShardedTensor",
    "StorageInfo",
    "all_gather_single",
    "buffer_broadcast_kwargs",
    "dataloader_worker",
    "fsdp_states",
    "keep_process_groups",
    "load_tensors",
    "pytree",
    "register_first_post_hook",
]

#: Prefixes of the attributes that `fully_shard` and its decorator add to a module.
FSDP_ATTRIBUTES = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")

#: Gathers the tensors of all ranks into one tensor; named `all_gather_into_tensor` before torch 2.13.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Arguments of DCP's `Metadata` that name the version of the format; none before torch 2.10.
DCP_VERSION: dict[str, Any] = (
    {"version": dcp_filesystem.CURRENT_DCP_VERSION} if hasattr(dcp_filesystem, "CURRENT_DCP_VERSION") else {}
)

_SHARES_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


def load_tensors(tensors: dict[str, Any], reader: StorageReader) -> None:
    """Load tensors in place, on this process alone; `dcp.load` has no argument for this before torch 2.7."""
    _load_state_dict(tensors, reader, no_dist=True)


def keep_process_groups() -> None:
    """Never free the process groups of this process, not even when the interpreter clears its modules.

    Before torch 2.8, the destructor of gloo groups waits for exchanges and holds the GIL, which the end
    of an exchange needs.
    """
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def register_first_post_hook(optimizer: Any, hook: Callable[..., None]) -> None:
    """Call `hook` after each step of an optimizer, before the hooks that already exist."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)


def buffer_broadcast_kwargs(shares: bool) -> dict[str, Any]:
    """Return DistributedDataParallel's argument for the broadcast of rank 0's buffers in the forward pass."""
    return {_SHARES_BUFFERS: shares}
