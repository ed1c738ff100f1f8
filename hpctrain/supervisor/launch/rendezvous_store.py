"""Rendezvous store of an attempt, on a port that is bound before any rank starts."""

from __future__ import annotations

import logging
import select
import socket
from types import TracebackType
from typing import Any, Self

from hpctrain import system

log = logging.getLogger(__name__)


class RendezvousStore:
    """A bound port and, after `serve`, the store on this port. Each attempt has a separate store.

    Ranks may connect immediately: the kernel queues the connections until the store answers. PyTorch, which
    contains the store, can therefore be imported at the same time as in the ranks.
    """

    def __init__(self, address: str, *, on_demand: bool = False) -> None:
        """Bind a free port.

        Args:
            address: address of this host for the ranks.
            on_demand: let `serve` wait for the first connection, in a thread. A single rank seldom uses the
                store, and the import of PyTorch takes seconds and 200 MB.

        Raises:
            OSError: no port can be bound.
        """
        self._address = address
        self._wake: socket.socket | None = None
        self._lock, self._is_over = system.Lock(), False
        self._on_demand = on_demand
        # The store has no authentication, so other hosts can reach it only if ranks run there.
        self._socket: socket.socket | None = open_store_socket(address)
        self._port: int = self._socket.getsockname()[1]
        self._store: Any = None

    @property
    def variables(self) -> dict[str, str]:
        """Variables for `env://`: the address, and a flag which states that the store is already hosted."""
        return {
            "MASTER_ADDR": self._address,
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def serve(self) -> None:
        """Serve the store until the block ends."""
        if not self._on_demand:
            self._start_store()
            return
        self._wake, ended = socket.socketpair()
        system.Thread(target=self._serve_first_connection, args=(ended,), daemon=True).start()

    def _serve_first_connection(self, ended: socket.socket) -> None:
        assert self._socket is not None
        with ended:
            try:
                readable, _, _ = select.select([self._socket, ended], [], [])
            except (OSError, ValueError):
                return  # The attempt has ended, and the socket is closed.
            if ended in readable:
                return
        try:
            self._start_store()
        except Exception:
            log.exception("cannot start the rendezvous store for the rank")
            self._close()  # ends the connection of the rank

    def _start_store(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with self._lock:
            # The attempt may have ended during the import.
            if self._is_over:
                return
            assert self._socket is not None
            self._store = TCPStore(
                "127.0.0.1",
                self._port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=self._socket.detach(),
            )
            self._socket = None

    def was_used(self) -> bool:
        """Return true if any rank has stored a key, as ranks that form a process group do."""
        return self._store is not None and self._store.num_keys() > 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wake is not None:
            self._wake.close()
        self._close()

    def _close(self) -> None:
        with self._lock:
            self._is_over, self._store = True, None
            if self._socket is not None:
                self._socket.close()


def open_store_socket(address: str) -> socket.socket:
    """Return a socket that listens on a free port for connections to `address`.

    Raises:
        OSError: no port can be bound.
    """
    interface = address if address == "127.0.0.1" else ""
    if not interface and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN
        )
    return socket.create_server((interface, 0), backlog=socket.SOMAXCONN)
