"""Compute the port of a rendezvous, bind ports for torch's store, and limit and list connections."""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

from hpctrain.errors import HpctrainError

#: Below Linux's ephemeral ports (32768 and up), above the well-known ones.
FIRST_PORT, NUM_PORTS = 20_000, 12_000
#: Open files of a process in addition to its connections.
_SPARE_FILES = 64
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


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


def foreign_users(remote_port: int) -> list[str]:
    """Return the other users of this machine with a connection to `remote_port` on any host."""
    uids = {uid for port, uid in _connections() if port == remote_port}
    # The kernel shows connections that are being closed as root's.
    return sorted(_name(uid) for uid in uids - {os.getuid(), 0})


def _connections() -> Iterator[tuple[int, int]]:
    """Yield the remote port and user id of each connection."""
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text(encoding="ascii", errors="replace").splitlines()[1:]:
                fields = line.split()
                with contextlib.suppress(ValueError, IndexError):
                    yield int(fields[2].rpartition(":")[2], 16), int(fields[7])


def _name(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"uid {uid}"


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
