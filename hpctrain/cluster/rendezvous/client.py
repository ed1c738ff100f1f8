"""The rendezvous on ranks other than 0: find rank 0, and wait for all ranks."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from hpctrain.authentication import Signed, matches, new_nonce, sign_connection
from hpctrain.cluster.addresses import is_loopback, normalize_address, resolve_host
from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.rendezvous.protocol import (
    MAX_LINE_BYTES,
    Handshake,
    decode_message,
    encode_message,
    proof_of_rank_0,
    read_nonce,
    rendezvous_key,
)
from hpctrain.errors import RendezvousError, Unauthenticated

#: Time limits for a host that drops packets, and for a server that does not follow the protocol.
_CONNECT_LIMIT_S, _ANSWER_LIMIT_S = 3.0, 3.0
#: Time for rank 0 to report the missing ranks after the time limit of this rank.
_RESULT_GRACE_S = 3.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0


@dataclass(frozen=True)
class MasterEndpoint:
    """Address of rank 0, after all ranks have arrived."""

    address: str
    """Address of rank 0 for this rank."""
    port: int
    own_address: str
    """Address of this host for other hosts."""


@dataclass(frozen=True)
class _ServerConnection:
    """An authenticated connection to rank 0."""

    connection: socket.socket
    down: Signed
    address: str
    port: int

    def receive(self, limit_s: float) -> dict[str, Any] | None:
        """Return the next message of rank 0; None if it does not arrive within `limit_s` seconds."""
        line = _receive_line(self.connection, limit_s)
        if line is None:
            return None
        try:
            return self.down.open(line)
        except Unauthenticated as error:
            raise RendezvousError(f"rank 0 at {_format_endpoint(self.address, self.port)}: {error}") from None


class RendezvousClient:
    """Searches for rank 0 at all possible addresses of its host and all possible ports."""

    def __init__(
        self, ranks: Ranks, me: Handshake, ports: Sequence[int], environ: Mapping[str, str], deadline: float
    ) -> None:
        self._ranks, self._me, self._ports, self._environ = ranks, me, ports, environ
        self._key = rendezvous_key(ranks, environ)
        self._deadline = deadline
        self._attempts: dict[str, str] = {}
        self._resolved: list[str] = []
        self._stopped = threading.Event()

    def wait(self, remind_at: float, remind: Callable[[str], None]) -> MasterEndpoint:
        """Find rank 0, and wait for the other ranks.

        Args:
            remind_at: time of a report on missing ranks, on the monotonic clock.
            remind: receives the report.

        Raises:
            RendezvousError: rank 0 was not found in time, or reports a missing or duplicate rank.
        """
        server = self._find(remind_at, remind)
        if server is None:
            raise RendezvousError(f"rank 0 was not found: {self.attempts_summary()}")
        with contextlib.closing(server.connection):
            words = server.receive(self._deadline - time.monotonic() + _RESULT_GRACE_S)
            own_address = normalize_address(str(server.connection.getsockname()[0]))
        where = f"rank 0 at {_format_endpoint(server.address, server.port)}"
        if words is None:
            raise RendezvousError(f"{where} responded, but disconnected before all ranks had connected")
        if "address" not in words:
            raise RendezvousError(f"{where} reports: {words.get('failed', words)}")
        return MasterEndpoint(
            str(words["address"]),
            server.port,
            str(words["host_address"]) if is_loopback(own_address) else own_address,
        )

    def detect_duplicate_rank0(self) -> None:
        """As rank 0, connect to rank 0, which is either this process or a second rank 0.

        Raises:
            RendezvousError: there is a second rank 0, which now has also detected this rank.
        """
        if server := self._find(float("inf"), lambda _: None):
            server.connection.close()

    def stop(self) -> None:
        """Make `detect_duplicate_rank0` return."""
        self._stopped.set()

    def attempts_summary(self) -> str:
        """Return the addresses tried, with the result of each."""
        return (
            "; ".join(f"{what}: {how}" for what, how in self._attempts.items()) or "no address could be tried"
        )

    def _find(self, remind_at: float, remind: Callable[[str], None]) -> _ServerConnection | None:
        """Return a connection to rank 0; None after the time limit."""
        pause_s = _FIRST_PAUSE_S
        while not self._is_expired():
            # All addresses of a port first: rank 0 usually has the first port, and unreachable addresses cost
            # time for each port.
            for port, address in product(self._ports, self._addresses()):
                if self._is_expired():
                    break
                try:
                    return self._try_connect(address, port)
                except OSError as error:
                    self._attempts[_format_endpoint(address, port)] = str(error.strerror or error)
            if time.monotonic() >= remind_at:
                remind(self.attempts_summary())
                remind_at = float("inf")
            # Random pauses, because thousands of ranks may connect at the same time.
            pause_s = min(_MAX_PAUSE_S, 1.5 * pause_s)
            wait_s = random.uniform(0.5, 1.0) * pause_s
            self._stopped.wait(max(0.0, min(wait_s, self._deadline - time.monotonic())))
        return None

    def _is_expired(self) -> bool:
        return self._stopped.is_set() or time.monotonic() >= self._deadline

    def _try_connect(self, address: str, port: int) -> _ServerConnection:
        """Return a connection to rank 0 at this address and port.

        Raises:
            OSError: there is no response, or the server is not rank 0.
        """
        left_s = max(0.1, self._deadline - time.monotonic())
        connection = socket.create_connection((address, port), timeout=min(_CONNECT_LIMIT_S, left_s))
        with contextlib.ExitStack() as on_error:
            on_error.callback(connection.close)
            left_s = max(0.1, self._deadline - time.monotonic())
            own = new_nonce()
            connection.sendall(encode_message({"nonce": own.decode()}))
            words = decode_message(_receive_line(connection, min(_ANSWER_LIMIT_S, left_s)) or b"")
            theirs = read_nonce(words)
            if words is None or theirs is None:
                raise OSError("found a server that is not rank 0 of this job")
            proof = str(words.get("proof")).encode(errors="replace")
            if not matches(proof, proof_of_rank_0(self._key, own, theirs).encode()):
                raise OSError("found a server that is not rank 0 of this job")
            up, down = sign_connection(self._key, theirs, own)
            left_s = max(0.1, self._deadline - time.monotonic())
            connection.sendall(
                up.seal(asdict(replace(self._me, left_s=left_s, reached=normalize_address(address))))
            )
            server = _ServerConnection(connection, down, address, port)
            words = server.receive(min(_ANSWER_LIMIT_S, left_s))
            if words is None:
                raise OSError("no response from rank 0")
            if "failed" in words:
                raise RendezvousError(
                    f"rank 0 at {_format_endpoint(address, port)} reports: {words['failed']}"
                )
            if "refused" in words:
                raise OSError(str(words["refused"]))
            on_error.pop_all()
        return server

    def _addresses(self) -> list[str]:
        """Return the possible addresses of rank 0's host: its resolved name, otherwise guesses.

        The server must prove that it is rank 0, so wrong guesses are harmless.
        """
        if not self._resolved:
            self._resolved = self._resolve(self._ranks.master_addr)
        addresses = list(self._resolved)
        if not addresses or (self._ranks.node_rank > 0 and all(map(is_loopback, addresses))):
            short, dot, _ = self._ranks.master_addr.partition(".")
            if dot and not _is_numeric(self._ranks.master_addr):
                addresses += self._resolve(short)
            addresses += self._addresses_from_slurm()
            if self._ranks.node_rank == 0:
                addresses.append("127.0.0.1")
        return list(dict.fromkeys(addresses))

    def _resolve(self, name: str) -> list[str]:
        try:
            addresses = resolve_host(name, min(5.0, max(0.1, self._deadline - time.monotonic())))
        except OSError as error:
            self._attempts[f"the name {name}"] = str(error.strerror or error)
            return []
        if name not in addresses:
            self._attempts[f"the name {name}"] = f"resolves to {', '.join(addresses)}"
        return addresses

    def _addresses_from_slurm(self) -> list[str]:
        """Return addresses from Slurm's variables: of cloud nodes, and of the host that runs srun."""
        addresses = []
        for entry in self._environ.get("SLURM_NODE_ALIASES", "").split(","):
            name, colon, rest = entry.partition(":")
            if colon and name == self._ranks.master_addr.partition(".")[0]:
                addresses.append(rest[1:].partition("]")[0] if rest[:1] == "[" else rest.partition(":")[0])
        addresses.append(self._environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))
        return [address for address in addresses if _is_numeric(address)]


def _receive_line(connection: socket.socket, limit_s: float) -> bytes | None:
    """Return the next line, or None if none arrives within `limit_s` seconds."""
    heard, deadline = bytearray(), time.monotonic() + limit_s
    with contextlib.suppress(OSError):
        while (left_s := deadline - time.monotonic()) > 0 and len(heard) <= MAX_LINE_BYTES:
            connection.settimeout(left_s)
            # Read byte by byte: data after this line belongs to the next line.
            byte = connection.recv(1)
            if byte == b"\n":
                return bytes(heard)
            if not byte:
                return None
            heard += byte
    return None


def _is_numeric(address: str) -> bool:
    try:
        normalize_address(address)
    except ValueError:
        return False
    return True


def _format_endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
