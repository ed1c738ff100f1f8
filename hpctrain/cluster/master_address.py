"""Choose the address and port at which ranks meet without a supervisor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from hpctrain.cluster.addresses import is_loopback, resolve_host
from hpctrain.cluster.env_variables import read_port
from hpctrain.cluster.ports import rendezvous_port
from hpctrain.cluster.ranks import Ranks


def master_endpoint(
    environ: Mapping[str, str], host: Callable[[], tuple[str, str]], key: str, key_source: str
) -> tuple[str, int, dict[str, str]]:
    """Return the address and port of the rendezvous, and their sources.

    MASTER_ADDR and MASTER_PORT take precedence over `host()` and the port computed from `key`.
    """
    sources = {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
    address = environ.get("MASTER_ADDR")
    if not address:
        address, sources["master_addr"] = host()
    if environ.get("MASTER_PORT"):
        return address, read_port(environ, "MASTER_PORT"), sources
    return address, rendezvous_port(key), sources | {"master_port": f"computed from {key_source}"}


def master_host(ranks: Ranks, environ: Mapping[str, str]) -> str:
    """Return rank 0's host by a name or address that resolves here; `master_addr` if there is none."""
    for host in _master_names(ranks, environ):
        with contextlib.suppress(OSError):
            addresses = resolve_host(host)
            if ranks.node_rank == 0 or not all(map(is_loopback, addresses)):
                return host
    return ranks.master_addr


def _master_names(ranks: Ranks, environ: Mapping[str, str]) -> Iterator[str]:
    yield ranks.master_addr
    short_name = ranks.master_addr.partition(".")[0]
    if not short_name.isdecimal():
        yield short_name
    if ranks.node_rank == 0:
        yield "127.0.0.1"
    # The addresses of cloud nodes, and of the host that runs srun.
    for entry in environ.get("SLURM_NODE_ALIASES", "").split(","):
        name, _, address = entry.partition(":")
        if name == short_name:
            yield address[1:].partition("]")[0] if address[:1] == "[" else address.partition(":")[0]
    if launch_address := environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        yield launch_address
