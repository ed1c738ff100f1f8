"""Users of connections on this machine, from the kernel's tables."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def connection_owner(port: int, remote_port: int) -> str | None:
    """Return the local user of the connection from `port` to `remote_port`; None if unknown."""
    return next((_name(uid) for own, to, uid in _connections() if (own, to) == (port, remote_port)), None)


def foreign_users(remote_port: int) -> list[str]:
    """Return the other users of this machine with a connection to `remote_port` on any host."""
    uids = {uid for _, to, uid in _connections() if to == remote_port}
    # The kernel shows connections that are being closed as root's.
    return sorted(_name(uid) for uid in uids - {os.getuid(), 0})


def _connections() -> Iterator[tuple[int, int, int]]:
    """Yield port, remote port and user id of each connection."""
    for table in _TABLES:
        with suppress(OSError):
            for line in table.read_text(encoding="ascii", errors="replace").splitlines()[1:]:
                fields = line.split()
                with suppress(ValueError, IndexError):
                    own, remote = (int(fields[i].rpartition(":")[2], 16) for i in (1, 2))
                    yield own, remote, int(fields[7])


def _name(uid: int) -> str:
    with suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"uid {uid}"
