"""A run folder that buffers writes in memory while its disk is full or unreachable, and writes them later."""

from __future__ import annotations

import errno
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.buffered_writer import BufferedLineWriter
from hpctrain.errors import HpctrainError
from hpctrain.files import own_file
from hpctrain.rundir import EventKind, RunDir, event_record

log = logging.getLogger(__name__)

_RETRY_EVERY_S = 2.0
#: Seconds to keep trying to write the buffered data when the supervisor ends; then it is lost.
FLUSH_TIMEOUT_S = 60.0
#: Space for some hundred lines and the failure files of a few ranks.
_RESERVE_BYTES = 64 * 1024
#: Time limit for a file system that is briefly unreachable.
_VANISHED_LIMIT_S = 60.0

#: Errors of the disk, not of the caller.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_AWAY = (errno.EIO, errno.ESTALE, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ETIMEDOUT)


def describe_disk_error(error: OSError, path: Path) -> str | None:
    """Describe a disk error at `path`; None for any other error."""
    place = error.filename or path
    if error.errno in _FULL:
        return f"disk full at {place}: {error.strerror}"
    return f"disk error at {place}: {error.strerror}" if error.errno in _AWAY else None


class BufferedLogHandler(logging.Handler):
    """Handler of the supervisor's log; failed writes are buffered and repeated later, in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.lines = BufferedLineWriter(path, lambda words: print(words, file=sys.stderr))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append_line(self.format(record))


@dataclass(frozen=True)
class BufferedRunDir(RunDir):
    """A run folder that buffers failed writes, treats them as written, and retries them."""

    _events: BufferedLineWriter = field(init=False, repr=False, compare=False)
    _files: dict[Path, str] = field(init=False, repr=False, compare=False, default_factory=dict)
    _tasks: dict[str, BufferedRunDir] = field(init=False, repr=False, compare=False, default_factory=dict)
    _attempts: set[int] = field(init=False, repr=False, compare=False, default_factory=set)
    _retrying: threading.Lock = field(init=False, repr=False, compare=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_events", BufferedLineWriter(self.events, log.warning))

    @property
    def trouble(self) -> str | None:
        """Reason why data waits to be written; None if nothing waits."""
        error = self._events.trouble
        return (
            None
            if error is None
            else describe_disk_error(error, self.path) or f"{self.path}: {error.strerror}"
        )

    def task(self, index: int | str) -> BufferedRunDir:
        """Return the buffered run folder of a task of a job array."""
        return self._tasks.setdefault(str(index), BufferedRunDir(super().task(index).path))

    def log_event(self, kind: EventKind, attempt: int, **fields: Any) -> None:
        """Append an event to the record, now or later.

        A failed run's last event includes the disk error, if any.
        """
        if kind == "finished" and fields.get("state") == "FAILED" and (trouble := self.trouble):
            fields["cause"] = "; ".join(filter(None, [fields.get("cause"), trouble]))
        self._events.append(event_record(kind, attempt, **fields))
        self._keep_trying()

    def read_events(self) -> Iterator[dict[str, Any]]:
        """Read the record, including events that wait to be written."""
        if not self._events.is_waiting:
            return super().read_events()
        with self._events.waiting() as waiting:
            try:
                written = list(super().read_events())
            except OSError as error:
                log.warning("cannot read %s: %s", self.events, error)
                written = []
        return iter([*written, *map(json.loads, waiting)])

    def write(self, path: Path, content: str) -> None:
        """Write a file of the run, now or later."""
        try:
            super().write(path, content)
        except OSError as error:
            log.warning("cannot write %s yet: %s", path, error)
            self._files[path] = content
            self._keep_trying()

    def new_attempt(self) -> int:
        """Claim the number of a new attempt, even if its folder cannot be made.

        Raises:
            HpctrainError: the run folder no longer exists.
        """
        self._wait_for_folder()
        try:
            attempt = super().new_attempt()
        except OSError as error:
            log.warning("cannot create the log folder: %s", error)
            attempt = max({*self.attempts(), *self._attempts}, default=-1) + 1
        self._attempts.add(attempt)
        return attempt

    def attempts(self) -> list[int]:
        """Return the numbers of all attempts, including those without a folder."""
        return sorted({*super().attempts(), *self._attempts})

    @property
    def reserve(self) -> Path:
        """File that reserves disk space for the run's last records."""
        return self.path / ".reserve"

    def keep_room(self) -> None:
        """Reserve the disk space that the run's last records need if the disk is full by then."""
        with suppress(OSError), open(self.reserve, "wb", opener=own_file) as file:
            file.write(bytes(_RESERVE_BYTES))

    def settle(self, limit_s: float = FLUSH_TIMEOUT_S) -> None:
        """Write what waits for at most `limit_s` seconds; print the events that still wait after that."""
        deadline = time.monotonic() + limit_s
        with suppress(OSError):
            self.reserve.unlink(missing_ok=True)
        while not self._flush():
            if time.monotonic() > deadline:
                with self._events.waiting() as waiting:
                    for line in waiting:
                        print(f"hpctrain: could not write to {self.events}: {line}", file=sys.stderr)
                return
            time.sleep(min(_RETRY_EVERY_S, limit_s))

    def _wait_for_folder(self) -> None:
        """Wait for the run folder: without it, ranks would start over and write to the wrong place."""
        deadline = time.monotonic() + _VANISHED_LIMIT_S
        while not _is_there(self.spec):
            if time.monotonic() > deadline:
                raise HpctrainError(
                    f"The run folder {str(self.path)!r}, or {self.spec.name} in it, has vanished. "
                    "Its disk may be unavailable. Restore it, then submit the run again."
                )
            time.sleep(min(_RETRY_EVERY_S, _VANISHED_LIMIT_S))

    def _flush(self) -> bool:
        """Write what waits, as far as possible. Returns True if nothing waits any more."""
        self._events.flush()
        for path, content in list(self._files.items()):
            try:
                super().write(path, content)
            except OSError:
                return False
            self._files.pop(path, None)
        return not self._events.is_waiting and all(task._flush() for task in list(self._tasks.values()))

    def _keep_trying(self) -> None:
        """Start a thread that retries while something waits."""
        if (self._events.is_waiting or self._files) and self._retrying.acquire(blocking=False):
            threading.Thread(target=self._try_until_written, name="hpctrain-record", daemon=True).start()

    def _try_until_written(self) -> None:
        try:
            while not self._flush():
                time.sleep(_RETRY_EVERY_S)
        finally:
            self._retrying.release()


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
