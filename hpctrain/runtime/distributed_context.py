"""Formation of torch's process group from the processes of a job."""

from __future__ import annotations

import atexit
import socket
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from hpctrain import messages
from hpctrain.cluster import Ranks
from hpctrain.cluster.connection_owners import foreign_users
from hpctrain.cluster.env_defaults import apply_env_defaults
from hpctrain.cluster.fd_limit import raise_fd_limit
from hpctrain.cluster.rendezvous import RendezvousInfo, rendezvous
from hpctrain.cluster.rendezvous.port import bind_socket
from hpctrain.errors import RendezvousError
from hpctrain.runtime.device_assignment import assign_device, choose_device
from hpctrain.runtime.gloo_shutdown import shut_down_process_group
from hpctrain.telemetry.startup_parts import StartupPart, startup_times

#: Time limit for the start of all ranks, which may import torch from a cold shared file system.
JOIN_TIMEOUT_S = 300.0
#: Time after which a rank reports the missing peers.
_REMIND_AFTER_S = 30.0
#: Maximum pause between two attempts to connect to rank 0.
_MAX_POLL_S = 0.2
#: torch's time limit for a collective.
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class DistributedContext:
    """The processes that train together, as seen by one process."""

    ranks: Ranks
    device: torch.device
    """The device of this rank."""
    cpu_group: dist.ProcessGroup | None
    """A group with a CPU backend for small objects; None for a single process."""
    extra_devices: tuple[torch.device, ...] = ()
    """Additional devices of this rank, for a single process only."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of this rank."""
        return (self.device, *self.extra_devices)

    @property
    def is_distributed(self) -> bool:
        return self.ranks.world_size > 1

    def broadcast_from_main(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank. All ranks must call this. See `all_gather`."""
        return self.broadcast(value, 0)

    def broadcast(self, value: Any, src: int, what: str = "a message") -> Any:
        """Return `value` of rank `src` on every rank. All ranks must call this. See `all_gather`."""
        if self.cpu_group is None:
            return value
        return messages.broadcast(self.cpu_group, value, src=src, what=what)

    def all_reduce_min(self, value: float) -> float:
        """Return the lowest `value` of all ranks on every rank. All ranks must call this."""
        if self.cpu_group is None:
            return value
        box = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(box, op=dist.ReduceOp.MIN, group=self.cpu_group)
        return box.item()

    def all_gather(self, value: Any, what: str = "a message") -> list[Any]:
        """Return the values of all ranks, in order, on every rank. All ranks must call this.

        See `hpctrain.messages.gather` for the types that can be sent. Errors name the value `what`.
        """
        if self.cpu_group is None:
            return [value]
        return messages.gather(self.cpu_group, value, what=what)

    def barrier(self) -> None:
        """Wait for all ranks. All ranks must call this."""
        if self.cpu_group is not None:
            dist.barrier(self.cpu_group)


def init_distributed(
    ranks: Ranks, environ: MutableMapping[str, str], *, use_gpus: bool = True
) -> DistributedContext:
    """Form the process group: with NCCL if there are GPUs, otherwise with gloo.

    All ranks must call this. A process group already created by the script is used unchanged.

    Args:
        ranks: the ranks of this process.
        environ: the environment of this process; GLOO_SOCKET_IFNAME is added if gloo would choose a wrong
            interface.
        use_gpus: false to use only CPUs.

    Raises:
        HpctrainError: there are too many peers for the limit on open files, or the ranks contradict each
            other.
        RendezvousError: not all peers arrived within `JOIN_TIMEOUT_S`, or some were unreachable.
    """
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


def _describe_store(environ: Mapping[str, str]) -> str:
    """Return the address of the store, and other users of this node with a connection to it."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "")
    users = foreign_users(int(port)) if port.isdecimal() else []
    seen = (
        f"other users connected to it from this node: {', '.join(users)}"
        if users
        else "no other user is connected to it from this node"
    )
    return f"store at {address}:{port}; {seen}"


def _listen(info: RendezvousInfo) -> int:
    """Return the listening socket of the store: the one that the other ranks have found, or a new one.

    Raises:
        OSError: the port is in use.
    """
    if info.reserved_port is not None:
        return info.reserved_port.detach_listener()
    with bind_socket(info.port, local_only=info.address == "127.0.0.1") as listener:
        listener.listen(socket.SOMAXCONN)
        return listener.detach()


def _await_listener(info: RendezvousInfo, deadline: float) -> None:
    """Wait until rank 0 listens. torch's store would wait up to a second between two attempts."""
    pause_s = 0.01
    while time.monotonic() < deadline:
        try:
            socket.create_connection((info.address, info.port), timeout=1.0).close()
            return
        except ConnectionRefusedError:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)
        except OSError:
            return  # the store reports it


def _initialize(ranks: Ranks, environ: MutableMapping[str, str], *, use_gpus: bool) -> torch.device:
    begun = time.monotonic()
    rendezvous_info = rendezvous(ranks, environ, timeout_s=JOIN_TIMEOUT_S, remind_after_s=_REMIND_AFTER_S)
    environ.update(apply_env_defaults(environ, rendezvous_info.gloo_variables(environ)))
    # torchrun's agent may host the store; otherwise, rank 0 hosts it.
    has_agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts_store = ranks.is_main and not has_agent_store
    if hosts_store:
        raise_fd_limit(ranks.world_size)
    try:
        listener = None
        if hosts_store:
            listener = _listen(rendezvous_info)
        elif not has_agent_store:
            _await_listener(rendezvous_info, begun + JOIN_TIMEOUT_S)
        store = TCPStore(
            rendezvous_info.address,
            rendezvous_info.port,
            world_size=ranks.world_size,
            is_master=hosts_store,
            timeout=timedelta(seconds=max(1.0, begun + JOIN_TIMEOUT_S - time.monotonic())),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        # An agent's store may survive from one attempt to the next.
        prefix = f"hpctrain/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        assignment = assign_device(ranks, environ, PrefixStore(f"{prefix}/devices", store), use_gpus=use_gpus)
        startup_times.end(StartupPart.STORE)
        with_nccl = assignment.device.type == "cuda" and not assignment.gpus_are_shared
        if assignment.gpus_are_shared and ranks.is_main:
            print(
                "hpctrain: some ranks share a GPU, which NCCL does not support. Using gloo instead.",
                flush=True,
            )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if with_nccl else "gloo",
            store=PrefixStore(prefix, store),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=_COLLECTIVE_TIMEOUT,
            device_id=assignment.device if with_nccl else None,
        )
    except RendezvousError as error:
        raise RendezvousError(f"{error} ({_describe_store(environ)})") from error
    except (dist.DistError, RuntimeError, OSError) as error:
        raise RendezvousError(
            f"rank {ranks.rank} on {socket.gethostname()} could not connect to its {ranks.world_size - 1} "
            f"peers at {rendezvous_info.address}:{rendezvous_info.port} ({ranks.sources.get('master_addr')}, "
            f"{ranks.sources.get('master_port')}) within {time.monotonic() - begun:.0f} s: {error} "
            f"({_describe_store(environ)})"
        ) from error
    return assignment.device
