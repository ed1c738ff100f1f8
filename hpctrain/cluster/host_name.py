"""The name of this host, as used by peers and the scheduler."""

from __future__ import annotations

import socket
from collections.abc import Mapping


def host_name(environ: Mapping[str, str]) -> str:
    """Return Slurm's node name, if any: simulated nodes on one machine differ only in this name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()
