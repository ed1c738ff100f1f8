"""Append lines to a file, and buffer them while the disk is full or unreachable."""

from __future__ import annotations

import json
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
    """Appends lines to a file, and keeps lines that cannot be written for the next try.

    Attributes:
        last_error: reason why the file cannot be written; None if it is writable.
    """

    def __init__(self, path: Path, report: ReportMessage) -> None:
        """Append to the file at `path`; report write failures and recovery with `report`."""
        self._path, self._report = path, report
        self._pending: deque[str] = deque(maxlen=_MAX_PENDING)
        self._retry_at = 0.0
        self._writing = system.RLock()
        self.last_error: OSError | None = None

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    @contextmanager
    def pending(self) -> Iterator[list[str]]:
        """Yield the buffered lines; no line is written during the block."""
        with self._writing:
            yield list(self._pending)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append each record as a line of JSON, immediately or later."""
        self.append_lines(*map(json.dumps, records))

    def append_lines(self, *lines: str) -> None:
        """Append lines after the buffered lines, immediately or later."""
        self._pending.extend(lines)
        if system.monotonic() >= self._retry_at:
            self.flush()

    def flush(self) -> None:
        """Write as many buffered lines as possible."""
        with self._writing:
            before = self.last_error
            try:
                append_lines(self._path, self._pending)
                self.last_error = None
            except OSError as error:
                self.last_error, self._retry_at = error, system.monotonic() + _RETRY_AFTER_S
            if before is None and self.last_error is not None:
                self._report(
                    f"hpctrain: cannot write {self._path}: {self.last_error.strerror}. The run continues. "
                    "Lines are kept in memory until the file can be written."
                )
            elif before is not None and self.last_error is None:
                self._report(f"hpctrain: {self._path} is writable again. All lines have been written.")
