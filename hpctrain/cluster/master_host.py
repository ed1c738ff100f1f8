"""Find the addresses that a rendezvous without a supervisor needs: of rank 0's host, and of this host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from hpctrain.cluster.addresses import address_towards, is_loopback, resolve_host
from hpctrain.cluster.hostlist import expand_hostlist
from hpctrain.cluster.ranks import Ranks
from hpctrain.errors import UserError


def master_host(ranks: Ranks, environ: Mapping[str, str]) -> str:
    """Return rank 0's host by a name or address that this host can resolve; `master_addr` if there is none.

    A name that resolves to a loopback address is valid only on the node of rank 0.
    """
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


def own_address(ranks: Ranks, environ: Mapping[str, str]) -> str | None:
    """Return the address of this host for other hosts; None if unknown, or if there are no other hosts.

    It is the address on the route to rank 0. On rank 0's host, which may resolve its own name to a loopback
    address, it is the address on the route to another host.
    """
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
