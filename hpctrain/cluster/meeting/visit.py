"""A peer's part of the meeting: it looks for rank 0, and waits there until all have come."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hpctrain.cluster.addresses import is_loopback, plain, resolve
from hpctrain.cluster.meeting.words import MAX_LINE_BYTES, Hello, decode, encode
from hpctrain.cluster.ranks import Ranks
from hpctrain.errors import MeetingFailed

#: A host that has not answered by then drops what it is sent; a server that has not is none of ours.
_CONNECT_LIMIT_S, _ANSWER_LIMIT_S = 3.0, 3.0
#: Rank 0 may need this long, after a rank's time is up, to tell it who is missing.
_VERDICT_GRACE_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


@dataclass(frozen=True)
class Place:
    """Where rank 0 is, once all have come."""

    address: str
    """Where this rank reaches it."""
    port: int
    own_address: str
    """The address by which the other ranks' hosts know this one."""


class Visit:
    """Looks for rank 0 at every address that its host may have, and every port that it may have taken."""

    def __init__(
        self, ranks: Ranks, me: Hello, ports: Sequence[int], environ: Mapping[str, str], deadline: float
    ) -> None:
        self._ranks, self._me, self._ports, self._environ = ranks, me, ports, environ
        self._deadline = deadline
        self._tried: dict[str, str] = {}
        self._resolved: list[str] = []
        self._over = threading.Event()

    def wait(self, remind_at: float, remind: Callable[[str], None]) -> Place:
        """Find rank 0, and wait there for the others.

        Args:
            remind_at: when to say what is being waited for, on the monotonic clock.
            remind: takes the sentence.

        Raises:
            MeetingFailed: rank 0 was not found in time, or says that a rank is missing or came twice.
        """
        found = self._find(remind_at, remind)
        if found is None:
            raise MeetingFailed(f"rank 0 was not found: {self.account()}")
        connection, address, port = found
        with contextlib.closing(connection):
            words = _hear(connection, self._deadline - time.monotonic() + _VERDICT_GRACE_S)
            own_address = plain(str(connection.getsockname()[0]))
        where = f"rank 0 at {_at(address, port)}"
        if words is None:
            raise MeetingFailed(f"{where} answered, but went away before all had come")
        if "address" not in words:
            raise MeetingFailed(f"{where} says: {words.get('failed', words)}")
        return Place(
            str(words["address"]),
            port,
            str(words["host_address"]) if is_loopback(own_address) else own_address,
        )

    def knock_as_rank_0(self) -> None:
        """As rank 0, knock where rank 0 is to be found: at one's own door, unless there is a second rank 0.

        Raises:
            MeetingFailed: there is one, which has learned of this one now.
        """
        if found := self._find(float("inf"), lambda _: None):
            found[0].close()

    def end(self) -> None:
        """Let `knock_as_rank_0` come to an end."""
        self._over.set()

    def account(self) -> str:
        """What was tried, and how each of it ended."""
        return "; ".join(f"{what}: {how}" for what, how in self._tried.items()) or "nothing could be tried"

    def _find(self, remind_at: float, remind: Callable[[str], None]) -> tuple[socket.socket, str, int] | None:
        """A connection to rank 0, the address and the port; None where the time is up."""
        pause_s = _FIRST_PAUSE_S
        while not self._is_over():
            # Port by port: most often rank 0 has the first one, and an address of its host that is cut off
            # from here costs a while for each port.
            for port, address in product(self._ports, self._addresses()):
                if self._is_over():
                    break
                try:
                    return self._knock(address, port), address, port
                except OSError as error:
                    self._tried[_at(address, port)] = str(error.strerror or error)
            if time.monotonic() >= remind_at:
                remind(self.account())
                remind_at = float("inf")
            # Not all ranks at the same moment: they may be thousands.
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)
            wait_s = random.uniform(0.5, 1.0) * pause_s
            self._over.wait(max(0.0, min(wait_s, self._deadline - time.monotonic())))
        return None

    def _is_over(self) -> bool:
        return self._over.is_set() or time.monotonic() >= self._deadline

    def _knock(self, address: str, port: int) -> socket.socket:
        """A connection to rank 0 at this place.

        Raises:
            OSError: nobody answers there, or somebody else does.
        """
        left_s = max(0.1, self._deadline - time.monotonic())
        connection = socket.create_connection((address, port), timeout=min(_CONNECT_LIMIT_S, left_s))
        with contextlib.ExitStack() as on_error:
            on_error.callback(connection.close)
            left_s = max(0.1, self._deadline - time.monotonic())
            connection.sendall(encode(replace(self._me, left_s=left_s, reached=plain(address))))
            words = _hear(connection, min(_ANSWER_LIMIT_S, left_s))
            if words is None or words.get("answer") != self._me.answer:
                raise OSError("a server that is not rank 0 of this job")
            if "failed" in words:
                raise MeetingFailed(f"rank 0 at {_at(address, port)} says: {words['failed']}")
            if "refused" in words:
                raise OSError(str(words["refused"]))
            on_error.pop_all()
        return connection

    def _addresses(self) -> list[str]:
        """Where rank 0's host may be: what its name resolves to, and where that is of no use, guesses.

        Whoever answers is asked who he is, so a wrong guess does no harm.
        """
        if not self._resolved:
            self._resolved = self._resolve(self._ranks.master_addr)
        addresses = list(self._resolved)
        if not addresses or (self._ranks.node_rank > 0 and all(map(is_loopback, addresses))):
            short, dot, _ = self._ranks.master_addr.partition(".")
            if dot and not _is_numeric(self._ranks.master_addr):
                addresses += self._resolve(short)
            addresses += self._told_by_slurm()
            if self._ranks.node_rank == 0:
                addresses.append("127.0.0.1")
        return list(dict.fromkeys(addresses))

    def _resolve(self, name: str) -> list[str]:
        try:
            addresses = resolve(name, min(5.0, max(0.1, self._deadline - time.monotonic())))
        except OSError as error:
            self._tried[f"the name {name}"] = str(error.strerror or error)
            return []
        if name not in addresses:
            self._tried[f"the name {name}"] = f"resolves to {', '.join(addresses)}"
        return addresses

    def _told_by_slurm(self) -> list[str]:
        """Addresses of nodes in Slurm's variables: of those in a cloud, and of the host that srun runs on."""
        addresses = []
        for entry in self._environ.get("SLURM_NODE_ALIASES", "").split(","):
            name, colon, rest = entry.partition(":")
            if colon and name == self._ranks.master_addr.partition(".")[0]:
                addresses.append(rest[1:].partition("]")[0] if rest[:1] == "[" else rest.partition(":")[0])
        addresses.append(self._environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))
        return [address for address in addresses if _is_numeric(address)]


def _hear(connection: socket.socket, limit_s: float) -> dict[str, Any] | None:
    """The next line, or None where none comes within `limit_s` seconds."""
    heard, deadline = bytearray(), time.monotonic() + limit_s
    with contextlib.suppress(OSError):
        while (left_s := deadline - time.monotonic()) > 0 and len(heard) <= MAX_LINE_BYTES:
            connection.settimeout(left_s)
            # Byte for byte: what follows the line is the next one.
            byte = connection.recv(1)
            if byte == b"\n":
                return decode(bytes(heard))
            if not byte:
                return None
            heard += byte
    return None


def _is_numeric(address: str) -> bool:
    try:
        plain(address)
    except ValueError:
        return False
    return True


def _at(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
