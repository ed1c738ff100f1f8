"""Tolerate a full or unreachable disk: buffer the lines of a file, and drop output to stdout and stderr."""

from __future__ import annotations

import io
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpctrain import system
from hpctrain.files import append_lines

#: Shows a message to the user.
ReportMessage = Callable[[str], None]

#: Maximum number of buffered lines; the oldest are dropped first.
_MAX_PENDING = 100_000
_RETRY_AFTER_S = 1.0


class BufferedLineWriter:
    """Appends lines to a file, and keeps lines that cannot be written for the next try."""

    def __init__(self, path: Path, report: ReportMessage) -> None:
        self._path, self._report = path, report
        self._pending: deque[str] = deque(maxlen=_MAX_PENDING)
        self._retry_at = 0.0
        self._writing = system.RLock()
        #: Reason why the file cannot be written; None if it is writable.
        self.last_error: OSError | None = None

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    @contextmanager
    def pending(self) -> Iterator[list[str]]:
        """Yield the buffered lines, none of which is written during the block."""
        with self._writing:
            yield list(self._pending)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append each record as a line of JSON, immediately or later."""
        self.append_lines(*map(json.dumps, records))

    def append_lines(self, *lines: str) -> None:
        self._pending.extend(lines)
        if system.monotonic() >= self._retry_at:
            self.flush()

    def flush(self) -> None:
        with self._writing:
            was_writable = self.last_error is None
            try:
                append_lines(self._path, self._pending)
                self.last_error = None
            except OSError as error:
                self.last_error, self._retry_at = error, system.monotonic() + _RETRY_AFTER_S
            if was_writable and self.last_error is not None:
                self._report(
                    f"hpctrain: cannot write {self._path}: {self.last_error.strerror}. The run continues. "
                    "Lines are kept in memory until the file can be written."
                )
            elif not was_writable and self.last_error is None:
                self._report(f"hpctrain: {self._path} is writable again. All lines have been written.")


class _LossyFile(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def make_stdio_lossy() -> None:
    """Make prints ignore write errors from now on. The streams are line-buffered."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        if (stream := getattr(sys, name)) is None:
            continue  # The stream was already closed when this process started.
        stream.flush()
        file = io.BufferedWriter(_LossyFile(fd, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True))
