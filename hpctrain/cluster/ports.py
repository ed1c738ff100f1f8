"""Compute the port of a rendezvous, and bind ports for torch's store."""

from __future__ import annotations

import contextlib
import socket
import zlib

#: Below Linux's ephemeral ports (32768 and up), above the well-known ones.
FIRST_PORT, NUM_PORTS = 20_000, 12_000


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
