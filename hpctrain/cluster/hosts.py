"""The host that a process runs on, by the name that its peers and the scheduler use."""

from __future__ import annotations

import socket
from collections.abc import Mapping


def host_name(environ: Mapping[str, str]) -> str:
    """Slurm's name of the node where there is one, which tells pretend nodes of one machine apart."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()
