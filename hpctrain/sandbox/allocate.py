"""Allocation of ports and addresses unused by other sandboxes and programs."""

from __future__ import annotations

import socket
from pathlib import Path

from hpctrain.errors import SchedulerError
from hpctrain.sandbox.layout import SandboxLayout, SandboxSize, list_folders

#: Below the ephemeral ports of Linux, so that no connection uses a port between the probe and its use.
_PORTS = range(26800, 32700)
_BLOCKS = range(1, 255)


def allocate(folder: Path, shape: SandboxSize) -> SandboxLayout:
    """Return the layout of a new sandbox in `folder`. The caller holds the lock until it is saved.

    Raises:
        SchedulerError: no ports or addresses are left.
    """
    others = [plan for other in list_folders(folder.parent) if (plan := SandboxLayout.load(other))]
    blocks = set(_BLOCKS) - {plan.block for plan in others}
    taken = {port for plan in others for port in plan.ports}
    free_run: list[int] = []
    for port in _PORTS:
        free_run = [*free_run, port] if port not in taken and _is_free(port) else []
        if blocks and len(free_run) == shape.num_ports:
            return SandboxLayout(folder, shape, free_run[0], min(blocks))
    raise SchedulerError(
        f"Cannot find {shape.num_ports} consecutive free ports between {_PORTS[0]} and {_PORTS[-1]}, or a "
        f"free address block in 127.26.0.0/16. Existing sandboxes on this machine: {len(others)}. Remove "
        "sandboxes that are no longer needed (hpctrain sandbox down)."
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
