"""Add the names of the nodes to /etc/hosts, and remove them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

#: Slurm requires resolvable node names. Each line of a sandbox ends with a mark.
HOSTS = Path("/etc/hosts")


def add_hosts(sandbox: str, addresses: Mapping[str, str], path: Path = HOSTS) -> None:
    lines = "".join(f"{address} {node}{_mark(sandbox)}\n" for node, address in addresses.items())
    old = path.read_bytes()
    # Prepended, because the last existing line may lack a newline.
    _rewrite(path, old, lines.encode() + _without_lines(sandbox, old))


def remove_hosts(sandbox: str, path: Path = HOSTS) -> None:
    """Remove the lines of a sandbox; every other byte is unchanged."""
    old = path.read_bytes()
    _rewrite(path, old, _without_lines(sandbox, old))


def _without_lines(sandbox: str, content: bytes) -> bytes:
    end = f"{_mark(sandbox)}\n".encode()
    return b"".join(line for line in content.splitlines(keepends=True) if not line.endswith(end))


def _mark(sandbox: str) -> str:
    return f" # hpctrain sandbox {sandbox}"


def _rewrite(path: Path, old: bytes, new: bytes) -> None:
    if new == old:
        return
    # Written in place, because containers mount this file, and a rename cannot replace a mounted file.
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, new, 0)
        os.ftruncate(fd, len(new))
    finally:
        os.close(fd)
