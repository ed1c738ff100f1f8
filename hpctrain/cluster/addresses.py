"""Resolution of host names to addresses, with a time limit.

An unresponsive resolver would otherwise block its caller for an unlimited time.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import sys
import threading
from collections.abc import Iterator, Mapping

#: Time limit for the resolver. Its own limit is often 5 s per server.
RESOLVE_LIMIT_S = 5.0

#: The interface on which gloo listens; by default the interface of the host name.
_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def resolve_host(name: str, limit_s: float = RESOLVE_LIMIT_S) -> list[str]:
    """Return the numeric addresses of host `name`, in the resolver's order, without duplicates.

    Raises:
        OSError: the name does not resolve, or the resolver did not respond within `limit_s` seconds.
    """
    answer: list[str] = []
    problem: list[OSError] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            problem.append(OSError(f"{error.strerror if isinstance(error, OSError) else error}"))
        else:
            answer.extend(dict.fromkeys(str(entry[4][0]) for entry in found))

    # A daemon thread, so that a blocked resolver does not keep this process from exiting.
    asking = threading.Thread(target=ask, name=f"resolve-{name}", daemon=True)
    asking.start()
    asking.join(limit_s)
    if problem:
        raise problem[0]
    if not answer:
        raise TimeoutError(f"the name was not resolved within {limit_s:.0f} s")
    return answer


def is_loopback(address: str) -> bool:
    """True if numeric `address` is a loopback address, which is local to every host."""
    return ipaddress.ip_address(address).is_loopback


def normalize_address(address: str) -> str:
    """Return numeric `address`, with IPv4-mapped addresses such as ::ffff:10.0.0.1 converted to IPv4."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return address


def gloo_variables(own_address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make gloo reachable from other hosts; empty if none are needed.

    gloo listens on the first address of this host's name. On Debian, this address is 127.0.1.1, which other
    hosts cannot reach.
    """
    if environ.get(_GLOO_VARIABLE) or is_loopback(own_address):
        return {}
    try:
        listens_at = next(filter(_is_own, resolve_host(socket.gethostname())), None)
    except OSError:
        listens_at = None
    if listens_at is not None and not is_loopback(listens_at):
        return {}
    interface = find_interface(own_address)
    return {_GLOO_VARIABLE: interface} if interface else {}


def address_towards(host: str) -> str:
    """Return this host's address on the route to `host`, as chosen by the kernel. Sends nothing."""
    for address in resolve_host(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with (
            contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe,
            contextlib.suppress(OSError),
        ):
            probe.connect((address, 9))
            return normalize_address(str(probe.getsockname()[0]))
    raise OSError(f"no route to {host}")


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


# Position of the address in Linux's sockaddr_in and sockaddr_in6.
_PLACES: dict[int, slice] = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}


class _Entry(ctypes.Structure):
    """The first fields of `struct ifaddrs`."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(ctypes.c_ubyte)),
]


def find_interface(address: str) -> str | None:
    """Return the interface of this host with numeric `address`, or None."""
    return next((name for name, its in interfaces() if its == address), None)


def interfaces() -> Iterator[tuple[str, str]]:
    """Yield (interface, numeric address) for each entry of getifaddrs(3)."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    try:
        entry = first
        while entry:
            found = entry.contents
            if found.address:
                family = int.from_bytes(bytes(found.address[0:2]), sys.byteorder)
                place = _PLACES.get(family)
                if place is not None:
                    raw = bytes(found.address[place])
                    yield found.name.decode(), socket.inet_ntop(family, raw)
            entry = found.next
    finally:
        libc.freeifaddrs(first)
