"""Resolve host names with a time limit, and find the addresses and interfaces of this host."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
import threading
from collections.abc import Iterator, Mapping

from hpctrain.cluster.hostlist import expand_hostlist
from hpctrain.cluster.ranks import Ranks
from hpctrain.errors import UserError

#: Time limit for the resolver. Its own limit is often 5 s per server.
RESOLVE_LIMIT_S = 5.0

#: The interface on which gloo listens; by default the interface of the host name.
_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
#: ioctl(2): the IPv4 address of an interface; see netdevice(7).
_SIOCGIFADDR = 0x8915


def resolve_host(name: str, limit_s: float = RESOLVE_LIMIT_S) -> list[str]:
    """Return the numeric addresses of a host; raise OSError if there is no answer in time."""
    addresses: list[str] = []
    problem: list[OSError] = []

    def ask() -> None:
        try:
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            problem.append(OSError(f"{error.strerror if isinstance(error, OSError) else error}"))
        else:
            addresses.extend(dict.fromkeys(str(entry[4][0]) for entry in entries))

    # A daemon thread, so that a blocked resolver does not keep this process from exiting.
    asking = threading.Thread(target=ask, name=f"resolve-{name}", daemon=True)
    asking.start()
    asking.join(limit_s)
    if problem:
        raise problem[0]
    if not addresses:
        raise TimeoutError(f"the name was not resolved within {limit_s:.0f} s")
    return addresses


def host_name(environ: Mapping[str, str]) -> str:
    """Return Slurm's node name, if any: simulated nodes on one machine differ only in this name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


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
    """Return the variables that keep gloo from using 127.0.1.1, the first address of a host on Debian."""
    if environ.get(_GLOO_VARIABLE) or is_loopback(own_address):
        return {}
    try:
        listens_at = next(filter(_is_own, resolve_host(socket.gethostname())), None)
    except OSError:
        listens_at = None
    if listens_at is not None and not is_loopback(listens_at):
        return {}
    interface = next((name for name, address in interfaces() if address == own_address), None)
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


def interfaces() -> Iterator[tuple[str, str]]:
    """Yield (interface, numeric address) for the addresses of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # An interface may have no IPv4 address.
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield name, socket.inet_ntoa(reply[20:24])
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            digits, *_, name = line.split()
            yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def own_address(ranks: Ranks, environ: Mapping[str, str]) -> str | None:
    """Return this host's address on the route to rank 0, or from there to another host; None if unknown."""
    if ranks.num_nodes == 1:
        return None
    try:
        hosts = expand_hostlist(environ.get("SLURM_STEP_NODELIST", ""))
    except UserError:
        hosts = []
    for host in (ranks.master_addr, *hosts[-1:], environ.get("SLURM_LAUNCH_NODE_IPADDR")):
        with contextlib.suppress(OSError):
            if host and not is_loopback(address := address_towards(host)):
                return address
    return None
