"""Network interfaces and their addresses from getifaddrs(3), which Python's library does not provide."""

from __future__ import annotations

import ctypes
import socket
import sys
from collections.abc import Iterator

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
