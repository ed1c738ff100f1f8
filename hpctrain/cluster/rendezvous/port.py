"""Rank 0's port, reserved against other rendezvous but available to torch's store."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterable

from hpctrain.errors import RendezvousError


class ReservedPort:
    """A port on all addresses of this host, reserved for a rendezvous.

    Two sockets are bound to the port. One socket listens. The other reserves the port: the kernel lets
    another socket listen on this port only with SO_REUSEADDR, as torch's store does. Such sockets do not
    exclude each other. A process therefore first binds a Unix socket name, which is unique.
    """

    def __init__(self, number: int) -> None:
        """Bind and listen.

        Raises:
            OSError: the port is in use.
        """
        self.number = number
        with contextlib.ExitStack() as on_error:
            self._right = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            if sys.platform == "linux":
                # An abstract name: unique per network namespace, like a port, and released with its holder.
                self._right.bind(f"\0hpctrain-port-{number}")
            self._hold = on_error.enter_context(bind_socket(number))
            self.listener = on_error.enter_context(bind_socket(number))
            self.listener.listen(socket.SOMAXCONN)
            on_error.pop_all()

    def detach_listener(self) -> int:
        """Return the descriptor of the listening socket, which the caller then owns."""
        listener = self.listener.detach()
        self.close()
        return listener

    def reserve(self) -> None:
        """Stop listening, and keep the port for the program that replaces this process by exec.

        Works only on Linux: elsewhere the port is free afterwards.
        """
        self.listener.close()
        if sys.platform != "linux":
            self.close()
            return
        self._hold.set_inheritable(True)
        self._right.set_inheritable(True)

    def close(self) -> None:
        """Release the port."""
        for sock in (self.listener, self._hold, self._right):
            sock.close()


def bind_port(candidates: Iterable[int]) -> ReservedPort:
    """Reserve the first of `candidates` that is free.

    Raises:
        RendezvousError: no port is free.
    """
    tried = []
    for number in candidates:
        try:
            return ReservedPort(number)
        except OSError as error:
            tried.append(f"{number} ({error.strerror})")
    raise RendezvousError(
        f"cannot bind any of the ports {', '.join(tried)}. To find the programs that use them, run "
        "`ss --tcp --all --processes`. Alternatively, set MASTER_PORT to a free port on every rank."
    )


def bind_socket(number: int = 0, *, local_only: bool = False) -> socket.socket:
    """Return a socket that is bound to a port, but does not listen.

    While it does not listen, another socket with SO_REUSEADDR may listen on the port, as torch's store does.

    Args:
        number: the port; 0 chooses a free one.
        local_only: bind 127.0.0.1 instead of all addresses of IPv6 and IPv4.

    Raises:
        OSError: the port is in use.
    """
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
