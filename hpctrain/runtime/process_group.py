"""Joins the processes of a job into torch's process group."""

from __future__ import annotations

import atexit
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from hpctrain.cluster import Ranks
from hpctrain.errors import HpctrainError

#: How long a rank waits for its peers to come up: they import torch from a cold shared file system.
JOIN_TIMEOUT_S = 300.0
#: How long a collective may take before torch gives up.
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Team:
    """The processes that train together, seen from one of them."""

    ranks: Ranks
    device: torch.device
    """Where this rank computes."""
    control: dist.ProcessGroup | None
    """A group with a CPU backend for small objects; None where there is only one process."""

    @property
    def is_distributed(self) -> bool:
        return self.ranks.world_size > 1

    def from_main(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank. All ranks must call this."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks. All ranks must call this."""
        if self.control is not None:
            dist.barrier(self.control)


def join(ranks: Ranks, environ: Mapping[str, str]) -> Team:
    """Meet the other processes: NCCL where there are GPUs, gloo where there are none.

    All ranks must call this. A process group that the script has made already is used as it is.

    Raises:
        HpctrainError: the peers did not all come within `JOIN_TIMEOUT_S`.
    """
    device = choose_device(ranks)
    if ranks.world_size == 1:
        return Team(ranks, device, None)
    if not dist.is_initialized():
        _initialize(ranks, environ, device)
        atexit.register(_leave_group)
    control = dist.new_group(backend="gloo") if device.type == "cuda" else dist.group.WORLD
    return Team(ranks, device, control)


def choose_device(ranks: Ranks) -> torch.device:
    """The local rank's GPU where several are visible, the only one where one is, else the CPU.

    Raises:
        HpctrainError: the node has more ranks than visible GPUs, and more than one GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return torch.device("cpu")
    if count > 1 and ranks.local_rank >= count:
        raise HpctrainError(
            f"local rank {ranks.local_rank} (of {ranks.local_world_size}) on {socket.gethostname()}, but "
            f"only {count} GPUs are visible here. Submit with --gpus-per-node={ranks.local_world_size}, "
            "or start fewer ranks."
        )
    device = torch.device("cuda", ranks.local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def _initialize(ranks: Ranks, environ: Mapping[str, str], device: torch.device) -> None:
    # A supervisor (ours or torchrun's agent) hosts the store itself; otherwise rank 0 does.
    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = f"{ranks.master_addr}:{ranks.master_port}"
    begun = time.monotonic()
    try:
        store = TCPStore(
            ranks.master_addr,
            ranks.master_port,
            world_size=ranks.world_size,
            is_master=ranks.rank == 0 and not hosted,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
            wait_for_workers=False,
        )
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=PrefixStore("hpctrain", store),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=_COLLECTIVE_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistError, RuntimeError) as error:
        raise HpctrainError(
            f"rank {ranks.rank} on {socket.gethostname()} did not meet its {ranks.world_size - 1} peers "
            f"at {where} "
            f"({ranks.sources.get('master_addr')}, {ranks.sources.get('master_port')}) "
            f"after {time.monotonic() - begun:.0f} s: {error}"
        ) from error


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
