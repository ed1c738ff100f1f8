"""Line writer that tolerates a full disk or a vanished folder."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """Appends lines to a file, and buffers lines while they cannot be written."""

    def __init__(self, path: Path, say: ReportMessage) -> None:
        """Append to the file at `path`; report write failures and recovery with `say`."""
        self._path, self._report = path, say
        self._pending: deque[str] = deque(maxlen=_MAX_PENDING)
        self._retry_at = 0.0
        self._writing = system.RLock()
        self.last_error: OSError | None = None
        """Reason why the file cannot be written; None if it is writable."""

    @property
    def has_pending(self) -> bool:
        """True if lines are buffered."""
        return bool(self._pending)

    @contextmanager
    def pending(self) -> Iterator[list[str]]:
        """Yield the buffered lines; no line is written during the block."""
        with self._writing:
            yield list(self._pending)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append `record` as JSON after the buffered lines, immediately or later."""
        self.append_line(json.dumps(record))

    def append_all(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append all `records` after the buffered lines. Opens the file only once."""
        self._pending.extend(json.dumps(record) for record in records)
        if system.monotonic() >= self._retry_at:
            self.flush()

    def append_line(self, line: str) -> None:
        """Append `line` after the buffered lines, immediately or later."""
        self._pending.append(line)
        if system.monotonic() >= self._retry_at:
            self.flush()

    def flush(self) -> None:
        """Write as many buffered lines as possible."""
        with self._writing:
            self._flush()

    def _flush(self) -> None:
        try:
            append_lines(self._path, self._pending)
        except OSError as error:
            said, self.last_error = self.last_error is not None, error
            self._retry_at = system.monotonic() + _RETRY_AFTER_S
            if not said:
                self._report(
                    f"hpctrain: cannot write {self._path}: {error.strerror}. The run continues. Lines are "
                    "kept in memory until the file can be written."
                )
        else:
            if self.last_error is not None:
                self.last_error = None
                self._report(f"hpctrain: {self._path} is writable again. All lines have been written.")
