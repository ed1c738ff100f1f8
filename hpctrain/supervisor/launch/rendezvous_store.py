"""Rendezvous of an attempt, on a port that is reserved before any rank starts."""

from __future__ import annotations

import socket
from typing import Any, Self

from hpctrain.cluster.ports import bind_socket


class RendezvousStore:
    """A reserved port for the ranks of one attempt, and the store on this port if the supervisor hosts it.

    Rank 0 hosts the store of the ranks, as under plain `srun`. It is on this host, and listens on the port,
    which is bound but not open, so that no other program can use it.

    The supervisor hosts the store of torchrun agents and of node checks, which outlives their processes. They
    may connect immediately: the kernel queues the connections until the store answers. PyTorch, which
    contains the store, can therefore be imported at the same time as in the agents.
    """

    def __init__(self, address: str, *, hosted: bool = False) -> None:
        self._address = address
        # The store has no authentication, so other hosts can reach it only if ranks run there.
        self._socket = bind_socket(local_only=address == "127.0.0.1")
        self._port: int = self._socket.getsockname()[1]
        self._hosted = hosted
        if hosted:
            self._socket.listen(socket.SOMAXCONN)
        self._store: Any = None

    @property
    def variables(self) -> dict[str, str]:
        return {"MASTER_ADDR": self._address, "MASTER_PORT": str(self._port)}

    def serve(self) -> None:
        """Serve the store until the block ends, if this process hosts it."""
        if not self._hosted:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore(
            "127.0.0.1",
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store = None
        self._socket.close()
