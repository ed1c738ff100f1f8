"""Ports and addresses that no other sandbox has, and no other program listens on."""

from __future__ import annotations

import socket
from pathlib import Path

from hpctrain.errors import SchedulerError
from hpctrain.sandbox.plan import Plan, Shape, existing

#: Below the ports that Linux hands out by itself: no connection takes one between our probe and its use.
_PORTS = range(26800, 32700)
_BLOCKS = range(1, 255)


def allocate(folder: Path, shape: Shape) -> Plan:
    """Lay out the sandbox of `folder` beside the others. The caller holds the lock until the plan is saved.

    Raises:
        SchedulerError: no ports or addresses are left.
    """
    others = [plan for other in existing(folder.parent) if (plan := Plan.load(other))]
    blocks = set(_BLOCKS) - {plan.block for plan in others}
    taken = {port for plan in others for port in plan.ports}
    free_run: list[int] = []
    for port in _PORTS:
        free_run = [*free_run, port] if port not in taken and _is_free(port) else []
        if blocks and len(free_run) == shape.num_ports:
            return Plan(folder, shape, free_run[0], min(blocks))
    raise SchedulerError(
        f"{len(others)} sandboxes are here, and {shape.num_ports} free ports in a row between {_PORTS[0]} and"
        f" {_PORTS[-1]} are not: take down a sandbox that is no longer needed"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
