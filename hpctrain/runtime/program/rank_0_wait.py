"""Connect the ranks of a script to rank 0 as soon as it listens: torch pauses for up to a second."""

from __future__ import annotations

import os
import socket
import time
from types import ModuleType
from typing import Any

#: Seconds after which torch waits alone; its pauses then hardly matter.
_LIMIT_S = 10.0
_CONNECT_LIMIT_S, _MAX_PAUSE_S = 3.0, 0.05


def wait_in_rendezvous(module: ModuleType) -> None:
    """Let `env://` of `torch.distributed.rendezvous` wait for the port of rank 0."""
    handlers: dict[str, Any] = module._rendezvous_handlers
    create = handlers["env"]

    def wait_and_create(url: str, **kwargs: Any) -> Any:
        if os.environ.get("RANK", "0") != "0":
            _wait_for_port(os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
        return create(url, **kwargs)

    handlers["env"] = wait_and_create


def _wait_for_port(host: str, port: str) -> None:
    """Return when a program listens; after a while, torch reports the problem."""
    pause_s, deadline = 0.005, time.monotonic() + _LIMIT_S
    while host and port.isdecimal() and time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_LIMIT_S).close()
            return
        except (OSError, OverflowError):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
