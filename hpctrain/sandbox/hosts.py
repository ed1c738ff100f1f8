"""The sandboxes' lines in the hosts file: node names have to resolve, and Slurm does not see to that.

Each line carries its own mark, so that it is known by itself, whatever happened around it. Callers hold the
lock of `hpctrain.sandbox.lock`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

HOSTS = Path("/etc/hosts")


def add(sandbox: str, addresses: Mapping[str, str], path: Path = HOSTS) -> None:
    """Let the node names of `addresses` resolve; older lines of the same sandbox are replaced."""
    lines = "".join(f"{address} {node}{_mark(sandbox)}\n" for node, address in addresses.items())
    old = path.read_bytes()
    # In front, because there the other lines stay untouched even where the last of them has no newline.
    _rewrite(path, old, lines.encode() + _without(sandbox, old))


def remove(sandbox: str, path: Path = HOSTS) -> None:
    """Take the lines of a sandbox out; every other byte stays."""
    old = path.read_bytes()
    _rewrite(path, old, _without(sandbox, old))


def _without(sandbox: str, content: bytes) -> bytes:
    end = f"{_mark(sandbox)}\n".encode()
    return b"".join(line for line in content.splitlines(keepends=True) if not line.endswith(end))


def _mark(sandbox: str) -> str:
    return f" # hpctrain sandbox {sandbox}"


def _rewrite(path: Path, old: bytes, new: bytes) -> None:
    if new == old:
        return
    # In place: containers mount this file, and a mounted file cannot be replaced by a rename.
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, new, 0)
        os.ftruncate(fd, len(new))
    finally:
        os.close(fd)
