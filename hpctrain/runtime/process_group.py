"""Joins the processes of a job into torch's process group."""

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
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from hpctrain.cluster import Ranks
from hpctrain.cluster.connections import allow_connections
from hpctrain.cluster.defaults import with_defaults
from hpctrain.cluster.meeting import meet
from hpctrain.errors import HpctrainError
from hpctrain.runtime.device import agree_on_device, choose_device
from hpctrain.runtime.leaving import leave_group

#: How long a rank waits for its peers to come up: they import torch from a cold shared file system.
JOIN_TIMEOUT_S = 300.0
#: After this time it is said what is being waited for.
_REMIND_AFTER_S = 30.0
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
    further_devices: tuple[torch.device, ...] = ()
    """Where this rank computes besides; only a rank that is alone has any."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of this rank."""
        return (self.device, *self.further_devices)

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

    def lowest(self, value: float) -> float:
        """The lowest `value` of any rank, on every rank. All ranks must call this."""
        if self.control is None:
            return value
        box = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(box, op=dist.ReduceOp.MIN, group=self.control)
        return box.item()

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, in their order, on every rank. All ranks must call this."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        """Wait for all ranks. All ranks must call this."""
        if self.control is not None:
            dist.barrier(self.control)


def join(ranks: Ranks, environ: MutableMapping[str, str]) -> Team:
    """Meet the other processes: NCCL where there are GPUs, gloo where there are none.

    All ranks must call this. A process group that the script has made already is used as it is.

    Args:
        ranks: who this process is.
        environ: this process's own; gets GLOO_SOCKET_IFNAME where gloo would choose a wrong interface.

    Raises:
        HpctrainError: the peers did not all come within `JOIN_TIMEOUT_S`, or are more than this process may
            have connections to.
    """
    if ranks.world_size == 1:
        return Team(ranks, choose_device(ranks, environ), None)
    if dist.is_initialized():
        device = dist.distributed_c10d._get_default_group().bound_device_id or choose_device(ranks, environ)
    else:
        device = _initialize(ranks, environ)
        atexit.register(leave_group)
    control = dist.new_group(backend="gloo") if device.type == "cuda" else dist.group.WORLD
    return Team(ranks, device, control)


def _initialize(ranks: Ranks, environ: MutableMapping[str, str]) -> torch.device:
    begun = time.monotonic()
    meeting = meet(ranks, environ, timeout_s=JOIN_TIMEOUT_S, remind_after_s=_REMIND_AFTER_S)
    environ.update(with_defaults(environ, meeting.gloo_variables(environ)))
    # A supervisor (ours or torchrun's agent) hosts the store itself; otherwise rank 0 does.
    hosts_store = ranks.is_main and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if hosts_store:
        allow_connections(ranks.world_size)
    try:
        store = TCPStore(
            meeting.address,
            meeting.port,
            world_size=ranks.world_size,
            is_master=hosts_store,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
            wait_for_workers=False,
            # The very socket that the others have found: nobody can take the port in between.
            master_listen_fd=meeting.held.hand_over_listener() if meeting.held else None,
        )
        # An agent's store may live on from one start of the ranks to the next.
        prefix = f"hpctrain/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        agreed = agree_on_device(ranks, environ, PrefixStore(f"{prefix}/devices", store))
        with_nccl = agreed.device.type == "cuda" and not agreed.gpus_are_shared
        if agreed.gpus_are_shared and ranks.is_main:
            print(
                "hpctrain: ranks share GPUs, which NCCL refuses: gloo carries what they exchange", flush=True
            )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if with_nccl else "gloo",
            store=PrefixStore(prefix, store),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=_COLLECTIVE_TIMEOUT,
            device_id=agreed.device if with_nccl else None,
        )
    except (dist.DistError, RuntimeError) as error:
        raise HpctrainError(
            f"rank {ranks.rank} on {socket.gethostname()} did not meet its {ranks.world_size - 1} peers "
            f"at {meeting.address}:{meeting.port} "
            f"({ranks.sources.get('master_addr')}, {ranks.sources.get('master_port')}) "
            f"after {time.monotonic() - begun:.0f} s: {error}"
        ) from error
    return agreed.device
