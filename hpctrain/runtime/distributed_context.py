"""Form torch's process group from the processes of a job."""

from __future__ import annotations

import atexit
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from hpctrain.checkpoint.io import messages
from hpctrain.cluster import Ranks
from hpctrain.cluster.addresses import gloo_variables, own_address
from hpctrain.errors import RendezvousError
from hpctrain.runtime.release_devices import shut_down_process_group
from hpctrain.runtime.rendezvous import assign_device, choose_device, connect_store
from hpctrain.slurm.environment import apply_env_defaults
from hpctrain.telemetry.startup_parts import StartupPart, startup_times

#: Time limit for the start of all ranks, which may import torch from a cold shared file system.
JOIN_TIMEOUT_S = 300.0
#: torch's time limit for a collective.
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class DistributedContext:
    """The processes that train together, as seen by one process. Its methods are collective."""

    ranks: Ranks
    device: torch.device
    cpu_group: dist.ProcessGroup | None
    """A group with a CPU backend for small objects; None for a single process."""
    extra_devices: tuple[torch.device, ...] = ()
    """Additional devices of this rank, for a single process only."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return (self.device, *self.extra_devices)

    @property
    def is_distributed(self) -> bool:
        return self.ranks.world_size > 1

    def broadcast_from_main(self, value: Any) -> Any:
        return self.broadcast(value, 0)

    def broadcast(self, value: Any, src: int, label: str = "a message") -> Any:
        """Return the value of rank `src` on every rank; errors name it `label`."""
        if self.cpu_group is None:
            return value
        return messages.broadcast(self.cpu_group, value, src=src, label=label)

    def all_reduce_min(self, value: float) -> float:
        if self.cpu_group is None:
            return value
        lowest = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self.cpu_group)
        return lowest.item()

    def all_gather(self, value: Any, label: str = "a message") -> list[Any]:
        """Return the values of all ranks, in order, on every rank; errors name them `label`. See `gather`."""
        if self.cpu_group is None:
            return [value]
        return messages.gather(self.cpu_group, value, label=label)

    def barrier(self) -> None:
        if self.cpu_group is not None:
            dist.barrier(self.cpu_group)


def init_distributed(
    ranks: Ranks, environ: MutableMapping[str, str], *, use_gpus: bool = True
) -> DistributedContext:
    """Collective. Form the process group, with NCCL on GPUs, unless the script has formed one."""
    startup_times.end(StartupPart.IMPORTS)
    if ranks.world_size == 1:
        return DistributedContext(ranks, choose_device(ranks, environ, use_gpus=use_gpus), None)
    if dist.is_initialized():
        bound = dist.distributed_c10d._get_default_group().bound_device_id if use_gpus else None
        device = bound or choose_device(ranks, environ, use_gpus=use_gpus)
    else:
        device = _initialize(ranks, environ, use_gpus=use_gpus)
        atexit.register(shut_down_process_group)
    startup_times.end(StartupPart.GROUP)
    control = dist.new_group(backend="gloo") if device.type == "cuda" else dist.group.WORLD
    return DistributedContext(ranks, device, control)


def _initialize(ranks: Ranks, environ: MutableMapping[str, str], *, use_gpus: bool) -> torch.device:
    begun = time.monotonic()
    if address := own_address(ranks, environ):
        environ.update(apply_env_defaults(environ, gloo_variables(address, environ)))
    try:
        connected, problem = connect_store(ranks, environ, JOIN_TIMEOUT_S)
        # Another job may use the same computed port. An agent's store may survive to the next attempt.
        job = "" if environ.get("MASTER_PORT") else ascii(ranks.rendezvous_id)
        store = PrefixStore(f"hpctrain/{job}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", connected)
        device, is_gpu_shared = assign_device(
            ranks, environ, PrefixStore("devices", store), use_gpus=use_gpus, problem=problem
        )
        startup_times.end(StartupPart.STORE)
        with_nccl = device.type == "cuda" and not is_gpu_shared
        if is_gpu_shared and ranks.is_main:
            message = "some ranks share a GPU, which NCCL does not support. Using gloo instead."
            print(f"hpctrain: {message}", flush=True)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if with_nccl else "gloo",
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=_COLLECTIVE_TIMEOUT,
            device_id=device if with_nccl else None,
        )
    except (RendezvousError, dist.DistError, RuntimeError, OSError) as error:
        raise RendezvousError(
            f"rank {ranks.rank} on {socket.gethostname()} could not connect to its {ranks.world_size - 1} "
            f"peers within {time.monotonic() - begun:.0f} s: {error} (store at {ranks.master_addr}:"
            f"{ranks.master_port}; {ranks.sources.get('master_addr')}, {ranks.sources.get('master_port')})"
        ) from error
    return device
