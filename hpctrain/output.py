"""The output of a process, which a full disk or a vanished folder must not end."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Lenient(io.RawIOBase):
    """Writes to a file descriptor; what the file cannot take is lost."""

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


def make_lenient() -> None:
    """Let nothing that is printed from now on raise for what is wrong with the file that stdout or stderr is.

    Lines go out as soon as they are whole.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if before is None:
            continue  # It was closed when this process was started.
        before.flush()
        stream = io.TextIOWrapper(
            io.BufferedWriter(_Lenient(fd)),
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=True,
        )
        setattr(sys, name, stream)
