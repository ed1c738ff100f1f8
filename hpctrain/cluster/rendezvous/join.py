"""Joining of the rendezvous by each rank."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from hpctrain.cluster.addresses import address_towards, gloo_variables
from hpctrain.cluster.fd_limit import raised_fd_limit
from hpctrain.cluster.port_candidates import port_candidates
from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.rendezvous.client import RendezvousClient
from hpctrain.cluster.rendezvous.port import ReservedPort, bind_port
from hpctrain.cluster.rendezvous.protocol import Handshake, rendezvous_key
from hpctrain.cluster.rendezvous.server import RendezvousServer
from hpctrain.errors import RendezvousError
from hpctrain.text import pluralize

#: Time limit for all ranks to find each other.
RENDEZVOUS_TIMEOUT_S = 30.0
#: Number of ports that rank 0 tries. It is very unlikely that all of them are in use on a host.
_NUM_PORTS = 5
#: Seconds to wait for the end of the check for another rank 0, which may be connecting to a silent address.
_CHECK_END_S = 0.2


@dataclass(frozen=True)
class RendezvousInfo:
    """The result of the rendezvous."""

    address: str
    """Address of rank 0 for this rank: MASTER_ADDR."""
    port: int
    """Rank 0's port: MASTER_PORT on every rank."""
    own_address: str | None
    """Address of this host for other hosts; None if unknown."""
    reserved_port: ReservedPort | None = None
    """On rank 0, the listening port; None on other ranks or without a rendezvous."""

    def gloo_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that make gloo reachable from other hosts; empty if none are needed."""
        return gloo_variables(self.own_address, environ) if self.own_address else {}


def rendezvous(
    ranks: Ranks,
    environ: Mapping[str, str],
    *,
    timeout_s: float = RENDEZVOUS_TIMEOUT_S,
    remind_after_s: float | None = None,
) -> RendezvousInfo:
    """Find the other ranks. All ranks must call this, within `timeout_s` seconds of the first.

    If both MASTER_ADDR and MASTER_PORT are in `environ`, they are used without a check or a wait.

    Args:
        ranks: the ranks of this process.
        environ: the variables from which `ranks` was created.
        timeout_s: maximum time to wait for the other ranks.
        remind_after_s: seconds until missing ranks are reported on stderr.

    Raises:
        RendezvousError: not all ranks arrived; the message lists the tried addresses.
        HpctrainError: rank 0's process cannot open a connection to each peer.
    """
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return RendezvousInfo(ranks.master_addr, ranks.master_port, _own_address(ranks))
    begun = time.monotonic()
    deadline = begun + timeout_s
    remind_at = float("inf") if remind_after_s is None else begun + remind_after_s
    me = Handshake.of_this_process(ranks, environ)
    name = f"rank {ranks.rank} on {me.host}"

    def remind(text: str) -> None:
        print(f"hpctrain: {name} is waiting for its peers: {text}", file=sys.stderr, flush=True)

    ports = _ports(ranks, environ)
    client = RendezvousClient(ranks, me, ports, environ, deadline)
    try:
        if not ranks.is_main:
            endpoint = client.wait(remind_at, remind)
            return RendezvousInfo(endpoint.address, endpoint.port, endpoint.own_address)
        port = bind_port(ports)
        if ranks.world_size == 1:
            return RendezvousInfo("127.0.0.1", port.number, "127.0.0.1", port)
        try:
            server = RendezvousServer(
                port.listener,
                me,
                rendezvous_key(ranks, environ),
                deadline,
                f"{ranks.master_addr}, port {port.number}",
            )
            with raised_fd_limit(ranks.world_size), _duplicate_rank0_check(client, server):
                address = server.gather(remind_at, remind)
        except BaseException:
            port.close()
            raise
        return RendezvousInfo(address, port.number, address, port)
    except RendezvousError as error:
        raise RendezvousError(
            f"{name} could not connect to its {pluralize(ranks.world_size - 1, 'peer')} and gave up after "
            f"{time.monotonic() - begun:.0f} s: {error}"
        ) from None


def _ports(ranks: Ranks, environ: Mapping[str, str]) -> list[int]:
    """Return the possible ports of rank 0: MASTER_PORT, otherwise the computed ports."""
    if environ.get("MASTER_PORT"):
        return [ranks.master_port]
    # A single process has no peers, so any port is suitable.
    key = ranks.rendezvous_id if ranks.world_size > 1 else f"process {os.getpid()}"
    return list(islice(port_candidates(key), _NUM_PORTS))


def _own_address(ranks: Ranks) -> str | None:
    """Return the address of this host for other hosts: its address on the route to rank 0."""
    if ranks.num_nodes == 1:
        return None
    with contextlib.suppress(OSError):
        return address_towards(ranks.master_addr)
    return None


@contextlib.contextmanager
def _duplicate_rank0_check(client: RendezvousClient, server: RendezvousServer) -> Iterator[None]:
    """Check in a thread that no other process claims to be rank 0."""

    def look() -> None:
        try:
            client.detect_duplicate_rank0()
        except RendezvousError as error:
            server.abort(str(error))

    thread = threading.Thread(target=look, name="hpctrain-second-rank-0", daemon=True)
    thread.start()
    try:
        yield
    finally:
        client.stop()
        # Otherwise, it may connect to the next rendezvous of this process as an apparent second rank 0.
        thread.join(_CHECK_END_S)
