"""Receive the messages of all ranks, and check them regularly, in one thread."""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from hpctrain import system
from hpctrain.authentication import NONCE_LENGTH, Signed, new_nonce, new_secret, sign_connection
from hpctrain.cluster.ports import bind_socket
from hpctrain.errors import Unauthenticated
from hpctrain.rundir import SUPERVISOR_ADDRESS_VARIABLE

log = logging.getLogger(__name__)

#: Seconds between two checks.
TICK_INTERVAL_S = 1.0
#: Maximum size of a message in bytes; messages of ranks are far shorter.
_MAX_MESSAGE = 1 << 16
#: Limits for unauthenticated connections: bytes, and seconds.
_UNPROVEN_BYTES, _UNPROVEN_S = 512, 10.0
#: Maximum number of refused connections to log.
_MAX_REPORTS = 10
#: Pause in seconds after an error of the thread.
_PAUSE_S = 1.0


@dataclass(eq=False)
class RankConnection:
    """A connection, assigned to a rank after authentication."""

    connection: socket.socket
    peer: tuple[str, int]
    nonce: bytes = field(default_factory=new_nonce)
    since: float = field(default_factory=lambda: system.monotonic())
    attempt: int = -1
    rank: int = -1
    received: bytearray = field(default_factory=bytearray)
    up: Signed | None = None
    down: Signed | None = None

    @property
    def is_proven(self) -> bool:
        return self.rank >= 0


class HeartbeatHandler(Protocol):
    """Receiver of the ranks' messages. All calls are made by one thread."""

    def on_join(self, attempt: int, introduction: Mapping[str, Any]) -> int:
        """Return a number, in place of its rank, for a process of a group with its own ranks."""

    def on_message(self, attempt: int, rank: int, message: Mapping[str, Any]) -> None: ...

    def on_disconnect(self, attempt: int, rank: int) -> None: ...

    def on_tick(self) -> None: ...


class HeartbeatServer:
    """Port for the connections of all ranks, which prove that they have the run's secret, as does this side.

    Every line has a MAC, which is checked before the line is parsed.
    """

    def __init__(self, address: str, handler: HeartbeatHandler) -> None:
        self._address, self._handler = address, handler
        (self._secret,) = new_secret().values()
        self._socket = bind_socket(local_only=address == "127.0.0.1")
        self._socket.listen(socket.SOMAXCONN)
        self._socket.setblocking(False)
        self._port = self._socket.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._lock = system.Lock()
        self._connections: dict[tuple[int, int], RankConnection] = {}
        self._unproven: dict[RankConnection, None] = {}
        self._num_refused = 0
        self._next_tick = 0.0
        self._thread = system.Thread(target=self._serve, name="lines", daemon=True)

    @property
    def variables(self) -> dict[str, str]:
        return {SUPERVISOR_ADDRESS_VARIABLE: f"{self._address}:{self._port}:{self._secret}"}

    def send(self, attempt: int, message: Mapping[str, Any], ranks: Container[int] | None = None) -> int:
        """Send a message to connected ranks of an attempt, by default all; returns the number reached."""
        num_reached = 0
        with self._lock:
            receivers = [
                connection
                for (of, rank), connection in self._connections.items()
                if of == attempt and (ranks is None or rank in ranks)
            ]
            for rank_connection in receivers:
                assert rank_connection.down is not None
                data = rank_connection.down.seal(message)
                with suppress(OSError):
                    # A full send buffer means that the rank has stopped reading.
                    num_reached += rank_connection.connection.send(data) == len(data)
        return num_reached

    def num_connected(self, attempt: int) -> int:
        with self._lock:
            return sum(of == attempt for of, _ in self._connections)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._wake_write)
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._wake_read)

    def _serve(self) -> None:
        """Receive until the server closes. An error is logged and closes at most the affected connection."""
        while True:
            try:
                if self._poll():
                    return
            except Exception:
                log.exception("could not receive messages from the ranks; retrying in %g s", _PAUSE_S)
                system.sleep(_PAUSE_S)

    def _poll(self) -> bool:
        ready = self._selector.select(max(0.0, self._next_tick - system.monotonic()))
        # Read from existing connections first: accepting a new connection may drop an existing one.
        for key, _ in sorted(ready, key=lambda event: event[0].data is None):
            if key.fileobj == self._wake_read:
                return True
            if key.data is None:
                self._accept()
            elif key.data.connection.fileno() >= 0:
                self._read(key.data)
        if system.monotonic() >= self._next_tick:
            self._next_tick = system.monotonic() + TICK_INTERVAL_S
            overdue = [rank for rank in self._unproven if self._next_tick - rank.since > _UNPROVEN_S]
            for rank_connection in overdue:
                self._refuse(rank_connection, f"it did not authenticate within {_UNPROVEN_S:g} s")
            try:
                self._handler.on_tick()
            except Exception:
                log.exception("the heartbeat check failed")
        return False

    def _accept(self) -> None:
        try:
            connection, peer = self._socket.accept()
        except OSError:
            # The peer has gone, or too many files are open.
            system.sleep(_PAUSE_S / 10)
            return
        rank_connection = RankConnection(connection, peer[:2])
        with suppress(OSError):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.send(rank_connection.nonce + b"\n")
        self._selector.register(connection, selectors.EVENT_READ, rank_connection)
        self._unproven[rank_connection] = None

    def _read(self, rank_connection: RankConnection) -> None:
        try:
            data = rank_connection.connection.recv(65536 if rank_connection.is_proven else _UNPROVEN_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        rank_connection.received += data
        *lines, partial_line = rank_connection.received.split(b"\n")
        rank_connection.received = partial_line
        try:
            for line in lines:
                self._handle_line(rank_connection, bytes(line))
            if len(partial_line) > (limit := _MAX_MESSAGE if rank_connection.is_proven else _UNPROVEN_BYTES):
                raise Unauthenticated(f"received a line of more than {limit} bytes")
        except Unauthenticated as error:
            self._refuse(rank_connection, str(error))
        except Exception:
            rank, attempt = rank_connection.rank, rank_connection.attempt
            log.exception("could not handle a message from rank %d (attempt %d)", rank, attempt)
            self._drop(rank_connection)
        else:
            if not data:
                self._drop(rank_connection)

    def _handle_line(self, rank_connection: RankConnection, line: bytes) -> None:
        if rank_connection.up is None:
            if len(line) != NONCE_LENGTH:
                raise Unauthenticated("its first message is invalid")
            rank_connection.up, rank_connection.down = sign_connection(
                self._secret.encode(), rank_connection.nonce, line
            )
            return
        message = rank_connection.up.open(line)
        if rank_connection.is_proven:
            self._handler.on_message(rank_connection.attempt, rank_connection.rank, message)
            return
        attempt = int(message["attempt"])
        rank = self._handler.on_join(attempt, message) if "group" in message else int(message["rank"])
        rank_connection.attempt, rank_connection.rank = attempt, rank
        del self._unproven[rank_connection]
        with self._lock:
            self._connections[rank_connection.attempt, rank_connection.rank] = rank_connection

    def _refuse(self, rank_connection: RankConnection, reason: str) -> None:
        self._num_refused += 1
        if self._num_refused <= _MAX_REPORTS:
            is_last = self._num_refused == _MAX_REPORTS
            note = "; further refused connections will not be reported" if is_last else ""
            log.warning("a connection from %s was refused: %s%s", rank_connection.peer[0], reason, note)
        self._drop(rank_connection)

    def _drop(self, rank_connection: RankConnection) -> None:
        if rank_connection.connection.fileno() < 0:
            return
        self._selector.unregister(rank_connection.connection)
        self._unproven.pop(rank_connection, None)
        with self._lock:
            rank_connection.connection.close()
            if self._connections.get((rank_connection.attempt, rank_connection.rank)) is not rank_connection:
                return
            del self._connections[rank_connection.attempt, rank_connection.rank]
        try:
            self._handler.on_disconnect(rank_connection.attempt, rank_connection.rank)
        except Exception:
            log.exception("failed to record that rank %d disconnected", rank_connection.rank)
