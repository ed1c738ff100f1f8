"""Rank 0's port: taken so that no other meeting gets it, and so that the program behind it still can."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterable

from hpctrain.errors import MeetingFailed


class Port:
    """A port of this host, on all its addresses, and the right to it among meetings.

    Two sockets are bound to it. One listens. The other only holds the port: the kernel lets a second one
    listen beside it if that asks for SO_REUSEADDR, as torch's store does. Such sockets do not keep out each
    other; so who wants the port for a meeting first takes a name that only one process can have.
    """

    def __init__(self, number: int) -> None:
        """Bind, and listen.

        Raises:
            OSError: the port is taken.
        """
        self.number = number
        with contextlib.ExitStack() as on_error:
            self._right = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            if sys.platform == "linux":
                # A name in the abstract namespace, which is that of the ports: it goes with its holder.
                self._right.bind(f"\0hpctrain-port-{number}")
            self._hold = on_error.enter_context(_bind(number))
            self.listener = on_error.enter_context(_bind(number))
            self.listener.listen(socket.SOMAXCONN)
            on_error.pop_all()

    def hand_over_listener(self) -> int:
        """The listening socket, for somebody else to answer at; returns its descriptor."""
        listener = self.listener.detach()
        self.close()
        return listener

    def reserve(self) -> None:
        """Stop listening, and keep the port for a program that this process becomes by exec.

        Only Linux can: elsewhere the port is free again from here on.
        """
        self.listener.close()
        if sys.platform != "linux":
            self.close()
            return
        self._hold.set_inheritable(True)
        self._right.set_inheritable(True)

    def close(self) -> None:
        """Give the port back."""
        for sock in (self.listener, self._hold, self._right):
            sock.close()


def take_port(candidates: Iterable[int]) -> Port:
    """The first of `candidates` that is free.

    Raises:
        MeetingFailed: none of them is.
    """
    tried = []
    for number in candidates:
        try:
            return Port(number)
        except OSError as error:
            tried.append(f"{number} ({error.strerror})")
    raise MeetingFailed(
        f"of the ports {', '.join(tried)} none can be bound. "
        "See who has them with `ss --tcp --all --processes`, or set MASTER_PORT to a free one on every rank."
    )


def _bind(number: int) -> socket.socket:
    """A socket bound to a port of all addresses, of IPv6 and IPv4 where the kernel has both."""
    if socket.has_dualstack_ipv6():
        sock, address = socket.socket(socket.AF_INET6, socket.SOCK_STREAM), "::"
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        sock, address = socket.socket(socket.AF_INET, socket.SOCK_STREAM), "0.0.0.0"
    with contextlib.ExitStack() as on_error:
        on_error.enter_context(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, number))
        on_error.pop_all()
    return sock
