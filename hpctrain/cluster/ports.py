"""Compute the port of a rendezvous, bind ports for torch's store, and raise the limit on connections."""

from __future__ import annotations

import contextlib
import resource
import socket
import zlib
from typing import Any

from hpctrain.errors import HpctrainError

#: Below Linux's ephemeral ports (32768 and up), above the well-known ones.
FIRST_PORT, NUM_PORTS = 20_000, 12_000
#: Open files of a process in addition to its connections.
_SPARE_FILES = 64


def rendezvous_port(key: str) -> int:
    """Return a port that depends only on a set of processes, identified by `Ranks.rendezvous_id`."""
    return FIRST_PORT + zlib.crc32(key.encode(errors="surrogateescape")) % NUM_PORTS


def bind_socket(number: int = 0, *, local_only: bool = False) -> socket.socket:
    """Return a bound socket; torch's store may listen on its port, because it does not listen itself."""
    if not local_only and socket.has_dualstack_ipv6():
        sock, address = socket.socket(socket.AF_INET6, socket.SOCK_STREAM), "::"
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        address = "127.0.0.1" if local_only else "0.0.0.0"
    with contextlib.ExitStack() as on_error:
        on_error.enter_context(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, number))
        on_error.pop_all()
    return sock


def store_options(listener: int | None, torch_version: str) -> dict[str, Any]:
    """Return the arguments of a `TCPStore` that serves a listening socket, if any."""
    return {
        "is_master": listener is not None,
        "master_listen_fd": listener,
        "wait_for_workers": False,
        # That of torch 2.6 would not accept the socket.
        "use_libuv": not torch_version.startswith("2.6."),
    }


def raise_fd_limit(number: int) -> None:
    """Raise the soft limit, which many sites leave at 1024, to `number` connections for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= number:
        raise HpctrainError(
            f"This process requires {number} connections, one to each other rank, but may open only {hard} "
            "files (`ulimit -H -n`). Increase the limit on the nodes (LimitNOFILE of the slurmd service, or "
            "limits.conf(5)), or start fewer ranks."
        )
    required = number + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < required:
        raised = required if hard == resource.RLIM_INFINITY else min(required, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
