"""Output streams that tolerate a full disk or a vanished folder."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Lenient(io.RawIOBase):
    """Writes to a file descriptor, and drops data that cannot be written."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        try:
            return os.write(self._fd, data)
        except OSError:
            return len(memoryview(data).cast("B"))


def make_stdio_lossy() -> None:
    """Make prints to stdout and stderr ignore write errors from now on.

    The streams are line-buffered.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if before is None:
            continue  # The stream was already closed when this process started.
        before.flush()
        stream = io.TextIOWrapper(
            io.BufferedWriter(_Lenient(fd)),
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=True,
        )
        setattr(sys, name, stream)
