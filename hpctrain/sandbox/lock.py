"""The lock for creating, starting and removing sandboxes of this machine."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpctrain.errors import SchedulerError


@contextmanager
def sandbox_lock(root: Path, limit_s: float = 180.0) -> Iterator[None]:
    """Hold the lock of all sandboxes: the folder `root`, which is removed when empty.

    Raises:
        SchedulerError: another command held it for `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    while (fd := _open_locked(root)) is None:
        if time.monotonic() > deadline:
            raise SchedulerError(
                f"Another sandbox command has held the lock on {root} for {limit_s:.0f} s."
                " Wait until it has finished, and try again."
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty: there are sandboxes
            root.rmdir()
        os.close(fd)


def _open_locked(root: Path) -> int | None:
    try:
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, FileExistsError):  # its last holder removed it in between
        if root.exists() and not root.is_dir():
            raise
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A folder that was removed after it was opened does not count as the lock.
        if os.path.samestat(os.fstat(fd), os.stat(root)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None
