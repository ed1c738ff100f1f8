"""Rank 0's port: taken so that no other meeting gets it, and so that the program behind it still can."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterable

from hpctrain.errors import MeetingFailed


class Port:
    """A port of this host, on all its addresses.

    Two sockets are bound to it. One listens. The other only holds the port: Linux lets a second socket listen
    beside it as long as that one asks for SO_REUSEADDR, as torch's store does, and gives the port to nobody
    who does not ask, such as another meeting.
    """

    def __init__(self, number: int, *, exclusive: bool) -> None:
        """Bind, and listen.

        Args:
            number: of the port.
            exclusive: take it only if no other socket is bound to it, whatever the other one allows.

        Raises:
            OSError: the port is taken.
        """
        self.number = number
        self._hold = _bind(number, exclusive=exclusive)
        try:
            self.listener = _bind(number, exclusive=False)
            self.listener.listen(socket.SOMAXCONN)
        except OSError:
            self._hold.close()
            raise

    def hand_over_listener(self) -> int:
        """The listening socket, for somebody else to answer at; returns its descriptor."""
        self._hold.close()
        return self.listener.detach()

    def reserve(self) -> None:
        """Stop listening, and keep the port for a program that this process becomes by exec.

        Only Linux can: elsewhere the port is free again from here on.
        """
        self.listener.close()
        if sys.platform == "linux":
            self._hold.set_inheritable(True)
        else:
            self._hold.close()

    def close(self) -> None:
        """Give the port back."""
        self.listener.close()
        self._hold.close()


def take_port(candidates: Iterable[int], *, exclusive: bool) -> Port:
    """The first of `candidates` that is free.

    Raises:
        MeetingFailed: none of them is.
    """
    tried = []
    for number in candidates:
        try:
            return Port(number, exclusive=exclusive)
        except OSError as error:
            tried.append(f"{number} ({error.strerror})")
    raise MeetingFailed(
        f"rank 0 on {socket.gethostname()} can bind none of the ports {', '.join(tried)}. "
        "See who has them with `ss --tcp --all --processes`, or set MASTER_PORT to a free one on every rank."
    )


def _bind(number: int, *, exclusive: bool) -> socket.socket:
    """A socket bound to a port of all addresses, of IPv6 and IPv4 where the kernel has both."""
    if socket.has_dualstack_ipv6():
        sock, address = socket.socket(socket.AF_INET6, socket.SOCK_STREAM), "::"
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        sock, address = socket.socket(socket.AF_INET, socket.SOCK_STREAM), "0.0.0.0"
    with contextlib.ExitStack() as on_error:
        on_error.callback(sock.close)
        if not exclusive:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, number))
        # Asked for only now, it lets others in without having let us in beside another.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        on_error.pop_all()
    return sock
