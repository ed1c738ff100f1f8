"""Names of hosts and the addresses behind them, asked for within a limit of time.

A resolver that does not answer blocks its caller for as long as it likes; here nobody waits for it longer
than he wants to.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Mapping

from hpctrain.cluster.interfaces import interface_of

#: A resolver that has not answered by then is left alone. Theirs is often 5 s for each server.
RESOLVE_LIMIT_S = 5.0

#: The variable that tells gloo, which otherwise asks for its own host's name, where to listen.
_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def resolve(name: str, limit_s: float = RESOLVE_LIMIT_S) -> list[str]:
    """The numeric addresses of host `name`, in the resolver's order, each once.

    Raises:
        OSError: the name does not resolve, or the resolver did not answer within `limit_s` seconds.
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

    # A daemon: a resolver that hangs must not keep this process, either.
    asking = threading.Thread(target=ask, name=f"resolve-{name}", daemon=True)
    asking.start()
    asking.join(limit_s)
    if problem:
        raise problem[0]
    if not answer:
        raise TimeoutError(f"the resolver did not answer within {limit_s:.0f} s")
    return answer


def is_loopback(address: str) -> bool:
    """Whether numeric `address` means the host itself, on every host."""
    return ipaddress.ip_address(address).is_loopback


def plain(address: str) -> str:
    """Numeric `address`; one of IPv4 as such, even where a socket of IPv6 shows it as ::ffff:10.0.0.1."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return address


def gloo_variables(own_address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What gloo must be told so that other hosts reach it; empty where it finds that out by itself.

    gloo listens at the first address that this host's own name resolves to. Debian gives a host's name the
    address 127.0.1.1, at which no other host can reach it.

    Args:
        own_address: the address by which the other ranks' hosts know this one.
        environ: what is set already is the user's choice.
    """
    if environ.get(_GLOO_VARIABLE) or is_loopback(own_address):
        return {}
    try:
        listens_at = next(filter(_is_own, resolve(socket.gethostname())), None)
    except OSError:
        listens_at = None
    if listens_at is not None and not is_loopback(listens_at):
        return {}
    interface = interface_of(own_address)
    return {_GLOO_VARIABLE: interface} if interface else {}


def address_towards(host: str) -> str:
    """The address that the kernel gives this host on the way to `host`. Nothing is sent.

    Raises:
        OSError: `host` does not resolve, or no way leads there.
    """
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with (
            contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe,
            contextlib.suppress(OSError),
        ):
            probe.connect((address, 9))
            return plain(str(probe.getsockname()[0]))
    raise OSError(f"no way leads to {host}")


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
