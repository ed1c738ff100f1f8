"""Let stdout and stderr tolerate a full disk or a vanished folder."""

from __future__ import annotations

import io
import sys
from typing import Any


class _LossyFile(io.FileIO):
    """Drops data that cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def make_stdio_lossy() -> None:
    """Make prints ignore write errors from now on. The streams are line-buffered."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        if (before := getattr(sys, name)) is None:
            continue  # The stream was already closed when this process started.
        before.flush()
        file = io.BufferedWriter(_LossyFile(fd, "w", closefd=False))
        stream = io.TextIOWrapper(file, before.encoding, before.errors, line_buffering=True)
        setattr(sys, name, stream)
