"""The lines to all ranks: what they say is heard in one thread, which also looks around once in a while."""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from hpctrain.rundir import LINE_VARIABLE
from hpctrain.supervisor.rendezvous import listen_for_ranks

log = logging.getLogger(__name__)

#: Seconds between two looks.
LOOK_EVERY_S = 1.0
#: A rank's message is far shorter; whoever sends more is none.
_LONGEST_MESSAGE = 1 << 16


@dataclass(eq=False)
class Caller:
    """A rank on the line."""

    connection: socket.socket
    attempt: int = -1
    rank: int = -1
    received: bytearray = field(default_factory=bytearray)

    @property
    def is_known(self) -> bool:
        return self.rank >= 0


class Listener(Protocol):
    """Who hears the ranks. All calls come from one thread."""

    def hear(self, attempt: int, rank: int, message: Mapping[str, Any]) -> None:
        """A rank has said something."""

    def hung_up(self, attempt: int, rank: int) -> None:
        """A rank is gone, or its line is."""

    def look(self) -> None:
        """Time has passed."""


class Lines:
    """A port to which every rank holds a connection. Use as a context manager.

    Nobody but a rank of the run knows the token, and nobody else is heard. What they are told is no secret.
    """

    def __init__(self, address: str, listener: Listener) -> None:
        """Bind a free port.

        Args:
            address: where the ranks reach this host.
            listener: who hears them.

        Raises:
            OSError: no port can be bound.
        """
        self._address, self._listener = address, listener
        self._token = secrets.token_hex(8)
        self._socket = listen_for_ranks(address)
        self._socket.setblocking(False)
        self._port = self._socket.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._callers: dict[tuple[int, int], Caller] = {}
        self._thread = threading.Thread(target=self._serve, name="lines", daemon=True)

    @property
    def variables(self) -> dict[str, str]:
        """What tells a rank where to connect."""
        return {LINE_VARIABLE: f"{self._address}:{self._port}:{self._token}"}

    def tell(self, attempt: int, message: Mapping[str, Any]) -> int:
        """Send a message to all ranks of an attempt that are on the line; returns how many these are."""
        with self._lock:
            callers = [caller for (of, _), caller in self._callers.items() if of == attempt]
        data = json.dumps(message).encode() + b"\n"
        told = 0
        for caller in callers:
            # What does not go out at once is for a rank that has stopped reading.
            with suppress(OSError):
                told += caller.connection.send(data) == len(data)
        return told

    def on_the_line(self, attempt: int) -> int:
        """The number of an attempt's ranks that are on the line."""
        with self._lock:
            return sum(of == attempt for of, _ in self._callers)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._wake)
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._woken)

    def _serve(self) -> None:
        look_at = time.monotonic() + LOOK_EVERY_S
        while True:
            for key, _ in self._selector.select(max(0.0, look_at - time.monotonic())):
                if key.fileobj == self._woken:
                    return
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_EVERY_S
                try:
                    self._listener.look()
                except Exception:
                    log.exception("looking after the ranks failed")

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._selector.register(connection, selectors.EVENT_READ, Caller(connection))

    def _read(self, caller: Caller) -> None:
        try:
            data = caller.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.received += data
        *lines, rest = caller.received.split(b"\n")
        caller.received = rest
        try:
            for line in lines:
                self._take(caller, json.loads(line))
            if not data or len(rest) > _LONGEST_MESSAGE:
                self._drop(caller)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("somebody on the line says what no rank would: %s", error)
            self._drop(caller)

    def _take(self, caller: Caller, message: dict[str, Any]) -> None:
        if caller.is_known:
            self._listener.hear(caller.attempt, caller.rank, message)
            return
        if not secrets.compare_digest(str(message["token"]), self._token):
            raise ValueError("the token is not this run's")
        caller.attempt, caller.rank = int(message["attempt"]), int(message["rank"])
        with self._lock:
            self._callers[caller.attempt, caller.rank] = caller

    def _drop(self, caller: Caller) -> None:
        self._selector.unregister(caller.connection)
        caller.connection.close()
        with self._lock:
            if self._callers.get((caller.attempt, caller.rank)) is not caller:
                return
            del self._callers[caller.attempt, caller.rank]
        self._listener.hung_up(caller.attempt, caller.rank)
