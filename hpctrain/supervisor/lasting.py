"""The folder of a run whose disk is full, or gone: the supervisor goes on from memory, and writes later."""

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

from hpctrain.errors import HpctrainError
from hpctrain.patient import PatientLines
from hpctrain.rundir import EventKind, RunDir, event_record

log = logging.getLogger(__name__)

_RETRY_EVERY_S = 2.0
#: What is not written when the supervisor ends is tried for so long, and then lost.
SETTLE_LIMIT_S = 60.0
#: For some hundred lines, and files about a few ranks that failed.
_RESERVE_BYTES = 64 * 1024
#: A file system may be away for a moment.
_VANISHED_LIMIT_S = 60.0

#: What is wrong with the disk, and not with what asks it.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_AWAY = (errno.EIO, errno.ESTALE, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ETIMEDOUT)


def words_of_disk(error: OSError, path: Path) -> str | None:
    """What an error says of the disk at `path`; None where it is about something else."""
    place = error.filename or path
    if error.errno in _FULL:
        return f"disk full at {place}: {error.strerror}"
    return f"disk trouble at {place}: {error.strerror}" if error.errno in _AWAY else None


class LogFile(logging.Handler):
    """The supervisor's log. What cannot be written waits, and comes later, in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.lines = PatientLines(path, lambda words: print(words, file=sys.stderr))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append_line(self.format(record))


@dataclass(frozen=True)
class LastingRun(RunDir):
    """A run's folder. What cannot be written into it is held, counts as written here, and is tried again."""

    _events: PatientLines = field(init=False, repr=False, compare=False)
    _files: dict[Path, str] = field(init=False, repr=False, compare=False, default_factory=dict)
    _tasks: dict[str, LastingRun] = field(init=False, repr=False, compare=False, default_factory=dict)
    _attempts: set[int] = field(init=False, repr=False, compare=False, default_factory=set)
    _retrying: threading.Lock = field(init=False, repr=False, compare=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_events", PatientLines(self.events, log.warning))

    @property
    def trouble(self) -> str | None:
        """Why something waits to be written; None where nothing does."""
        error = self._events.trouble
        return None if error is None else words_of_disk(error, self.path) or f"{self.path}: {error.strerror}"

    def task(self, index: int | str) -> LastingRun:
        """The same of a task of a job array."""
        return self._tasks.setdefault(str(index), LastingRun(super().task(index).path))

    def log_event(self, kind: EventKind, attempt: int, **fields: Any) -> None:
        """Append an event to the record, now or later. A run that failed meanwhile says what hindered it."""
        if kind == "finished" and fields.get("state") == "FAILED" and (trouble := self.trouble):
            fields["cause"] = "; ".join(filter(None, [fields.get("cause"), trouble]))
        self._events.append(event_record(kind, attempt, **fields))
        self._keep_trying()

    def read_events(self) -> Iterator[dict[str, Any]]:
        """The record, with what waits to be written."""
        if not self._events.is_waiting:
            return super().read_events()
        with self._events.waiting() as waiting:
            try:
                written = list(super().read_events())
            except OSError as error:
                log.warning("%s cannot be read: %s", self.events, error)
                written = []
        return iter([*written, *map(json.loads, waiting)])

    def write(self, path: Path, content: str) -> None:
        """Write a file of the run, now or later."""
        try:
            super().write(path, content)
        except OSError as error:
            log.warning("%s cannot be written yet: %s", path, error)
            self._files[path] = content
            self._keep_trying()

    def new_attempt(self) -> int:
        """Claim the number of a new start of the workers, whether or not its folder can be made.

        Raises:
            HpctrainError: the run's folder is not there any more.
        """
        self._wait_for_folder()
        try:
            attempt = super().new_attempt()
        except OSError as error:
            log.warning("the folder for logs cannot be made: %s", error)
            attempt = max({*self.attempts(), *self._attempts}, default=-1) + 1
        self._attempts.add(attempt)
        return attempt

    def attempts(self) -> list[int]:
        """Numbers of all starts of the workers, those without a folder too."""
        return sorted({*super().attempts(), *self._attempts})

    @property
    def reserve(self) -> Path:
        """Room on the disk for the last words of the run."""
        return self.path / ".reserve"

    def keep_room(self) -> None:
        """Take the room that the last words of the run will need, should the disk be full then."""
        with suppress(OSError):
            self.reserve.write_bytes(bytes(_RESERVE_BYTES))

    def settle(self, limit_s: float = SETTLE_LIMIT_S) -> None:
        """Write what waits, for `limit_s` seconds at the most; what then still waits is printed instead."""
        deadline = time.monotonic() + limit_s
        with suppress(OSError):
            self.reserve.unlink(missing_ok=True)
        while not self._flush():
            if time.monotonic() > deadline:
                with self._events.waiting() as waiting:
                    for line in waiting:
                        print(f"hpctrain: could not be written to {self.events}: {line}", file=sys.stderr)
                return
            time.sleep(min(_RETRY_EVERY_S, limit_s))

    def _wait_for_folder(self) -> None:
        """Without it, ranks would begin anew, and write where nobody looks."""
        deadline = time.monotonic() + _VANISHED_LIMIT_S
        while not _is_there(self.spec):
            if time.monotonic() > deadline:
                raise HpctrainError(
                    f"The run's folder {str(self.path)!r} has vanished, or {self.spec.name} in it. "
                    "Its disk may be gone. Bring it back, and submit the run again."
                )
            time.sleep(min(_RETRY_EVERY_S, _VANISHED_LIMIT_S))

    def _flush(self) -> bool:
        """Write what waits, as far as that works. Returns whether nothing waits any more."""
        self._events.flush()
        for path, content in list(self._files.items()):
            try:
                super().write(path, content)
            except OSError:
                return False
            self._files.pop(path, None)
        return not self._events.is_waiting and all(task._flush() for task in list(self._tasks.values()))

    def _keep_trying(self) -> None:
        """While something waits, have it tried again without anybody's asking."""
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
