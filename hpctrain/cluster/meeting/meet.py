"""`meet`: what a rank calls."""

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
from hpctrain.cluster.connections import connections_allowed
from hpctrain.cluster.meeting.host import Host
from hpctrain.cluster.meeting.port import Port, take_port
from hpctrain.cluster.meeting.visit import Visit
from hpctrain.cluster.meeting.words import Hello
from hpctrain.cluster.ports import port_candidates
from hpctrain.cluster.ranks import Ranks
from hpctrain.errors import MeetingFailed

#: Ranks that did not find each other by then will not.
MEETING_TIMEOUT_S = 30.0
#: How many ports rank 0 tries. All of them taken on one host is less likely than any other mishap.
_NUM_PORTS = 5


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet."""

    address: str
    """Where this rank reaches rank 0: what MASTER_ADDR has to be here."""
    port: int
    """Rank 0's port: what MASTER_PORT has to be, on every rank."""
    own_address: str | None
    """The address by which the other ranks' hosts know this one; None where it is not known."""
    held: Port | None = None
    """On rank 0 the port itself, which listens; None elsewhere, and where no meeting was needed."""

    def gloo_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What gloo must be told so that other hosts reach it; empty where it finds that out by itself."""
        return gloo_variables(self.own_address, environ) if self.own_address else {}


def meet(
    ranks: Ranks,
    environ: Mapping[str, str],
    *,
    timeout_s: float = MEETING_TIMEOUT_S,
    remind_after_s: float | None = None,
) -> Meeting:
    """Find the other ranks. All ranks must call this, within `timeout_s` seconds of the first.

    Where MASTER_ADDR and MASTER_PORT are both in `environ`, somebody else sees to the meeting: nothing is
    checked, and nothing is waited for.

    Args:
        ranks: who this process is.
        environ: the variables that `ranks` was made of.
        timeout_s: how long to wait for the others.
        remind_after_s: when to say on stderr what is being waited for.

    Raises:
        MeetingFailed: the ranks did not all meet; the message says who tried what.
        HpctrainError: rank 0's process may not have a connection to each of its peers.
    """
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return Meeting(ranks.master_addr, ranks.master_port, _known_by(ranks))
    begun = time.monotonic()
    deadline = begun + timeout_s
    remind_at = float("inf") if remind_after_s is None else begun + remind_after_s
    me = Hello.of(ranks, environ)
    name = f"rank {ranks.rank} on {me.host}"

    def remind(text: str) -> None:
        print(f"hpctrain: {name} is waiting for its peers: {text}", file=sys.stderr, flush=True)

    ports = _ports(ranks, environ)
    visit = Visit(ranks, me, ports, environ, deadline)
    try:
        if not ranks.is_main:
            place = visit.wait(remind_at, remind)
            return Meeting(place.address, place.port, place.own_address)
        port = take_port(ports)
        if ranks.world_size == 1:
            return Meeting("127.0.0.1", port.number, "127.0.0.1", port)
        try:
            host = Host(port.listener, me, deadline, f"{ranks.master_addr}, port {port.number}")
            with connections_allowed(ranks.world_size), _looking_for_a_second(visit, host):
                address = host.gather(remind_at, remind)
        except BaseException:
            port.close()
            raise
        return Meeting(address, port.number, address, port)
    except MeetingFailed as error:
        raise MeetingFailed(
            f"{name} did not meet its {ranks.world_size - 1} peers; given up after "
            f"{time.monotonic() - begun:.0f} s: {error}"
        ) from None


def _ports(ranks: Ranks, environ: Mapping[str, str]) -> list[int]:
    """Where rank 0 may be found: at the port that somebody chose, or else at one that all compute alike."""
    if environ.get("MASTER_PORT"):
        return [ranks.master_port]
    # Nobody looks for a process that is alone.
    key = ranks.meeting_key if ranks.world_size > 1 else f"process {os.getpid()}"
    return list(islice(port_candidates(key), _NUM_PORTS))


def _known_by(ranks: Ranks) -> str | None:
    """The address by which other hosts know this one: the one on the way to rank 0's."""
    if ranks.num_nodes == 1:
        return None
    with contextlib.suppress(OSError):
        return address_towards(ranks.master_addr)
    return None


@contextlib.contextmanager
def _looking_for_a_second(visit: Visit, host: Host) -> Iterator[None]:
    """Meanwhile see whether another process takes itself for rank 0, too."""

    def look() -> None:
        try:
            visit.knock_as_rank_0()
        except MeetingFailed as error:
            host.give_up(str(error))

    threading.Thread(target=look, name="hpctrain-second-rank-0", daemon=True).start()
    try:
        yield
    finally:
        visit.end()
