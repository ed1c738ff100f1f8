"""Lines that a training writes, which a full disk or a vanished folder must not end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.files import append_json_line, end_torn_line

#: Tells a person something.
Say = Callable[[str], None]

#: Lines that are kept for later; the oldest go first.
_KEPT = 100_000
_RETRY_AFTER_S = 1.0


class PatientLines:
    """Appends JSON lines to a file; those that cannot be written are kept, and written once they can be."""

    def __init__(self, path: Path, say: Say) -> None:
        """Append to the file at `path`; tell by `say` when that does not work, and when it does again."""
        self._path, self._say = path, say
        self._waiting: deque[Mapping[str, Any]] = deque(maxlen=_KEPT)
        self._retry_at = 0.0
        self._in_trouble = True  # A crash may have cut the last line.
        self._said = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Write `record` behind those that wait, now or later."""
        self._waiting.append(record)
        if time.monotonic() >= self._retry_at:
            self.flush()

    def flush(self) -> None:
        """Write what waits, as far as that works."""
        try:
            if self._in_trouble:
                end_torn_line(self._path)
            while self._waiting:
                append_json_line(self._path, self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            self._in_trouble, self._retry_at = True, time.monotonic() + _RETRY_AFTER_S
            if not self._said:
                self._said = True
                self._say(
                    f"hpctrain: {self._path} cannot be written: {error.strerror}. Training goes on; "
                    "its lines are kept and written once that works again."
                )
        else:
            self._in_trouble = False
            if self._said:
                self._said = False
                self._say(f"hpctrain: {self._path} can be written again, and is complete.")
