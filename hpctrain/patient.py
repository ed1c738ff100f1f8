"""Lines that a run writes, which a full disk or a vanished folder must not end."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpctrain.files import append_lines

#: Tells a person something.
Say = Callable[[str], None]

#: Lines that are kept for later; the oldest go first.
_KEPT = 100_000
_RETRY_AFTER_S = 1.0


class PatientLines:
    """Appends lines to a file; those that cannot be written are kept, and written once they can be."""

    def __init__(self, path: Path, say: Say) -> None:
        """Append to the file at `path`; tell by `say` when that does not work, and when it does again."""
        self._path, self._say = path, say
        self._waiting: deque[str] = deque(maxlen=_KEPT)
        self._retry_at = 0.0
        self._writing = threading.RLock()
        self.trouble: OSError | None = None
        """Why the file cannot be written; None where it can."""

    @property
    def is_waiting(self) -> bool:
        """Whether there are lines that could not be written so far."""
        return bool(self._waiting)

    @contextmanager
    def waiting(self) -> Iterator[list[str]]:
        """The lines that could not be written so far; none is written while the block lasts."""
        with self._writing:
            yield list(self._waiting)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write `record` as JSON behind what waits, now or later."""
        self.append_line(json.dumps(record))

    def append_all(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write all `records` behind what waits; opening the file once takes less time than for each."""
        self._waiting.extend(json.dumps(record) for record in records)
        if time.monotonic() >= self._retry_at:
            self.flush()

    def append_line(self, line: str) -> None:
        """Write `line` behind those that wait, now or later."""
        self._waiting.append(line)
        if time.monotonic() >= self._retry_at:
            self.flush()

    def flush(self) -> None:
        """Write what waits, as far as that works."""
        with self._writing:
            self._flush()

    def _flush(self) -> None:
        try:
            append_lines(self._path, self._waiting)
        except OSError as error:
            said, self.trouble = self.trouble is not None, error
            self._retry_at = time.monotonic() + _RETRY_AFTER_S
            if not said:
                self._say(
                    f"hpctrain: {self._path} cannot be written: {error.strerror}. The run goes on; "
                    "its lines are kept and written once that works again."
                )
        else:
            if self.trouble is not None:
                self.trouble = None
                self._say(f"hpctrain: {self._path} can be written again, and is complete.")
