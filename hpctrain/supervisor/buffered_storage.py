"""Buffer the writes of a run while its disk is full or unreachable, and repeat them later."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hpctrain import system
from hpctrain.errors import HpctrainError
from hpctrain.record_types import Event, decode
from hpctrain.records.buffered_writer import BufferedLineWriter
from hpctrain.rundir import RunDir, RunStorage

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_RETRY_INTERVAL_S = 2.0
#: Seconds to retry writing the buffered data when the supervisor exits; later the data is lost.
FLUSH_TIMEOUT_S = 60.0
#: Time limit for a file system that is briefly unreachable.
_VANISHED_LIMIT_S = 60.0

#: Errors caused by the disk, not by the caller.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_AWAY = (errno.EIO, errno.ESTALE, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ETIMEDOUT)


def describe_disk_error(error: OSError, path: Path) -> str | None:
    if error.errno not in (*_FULL, *_AWAY):
        return None
    problem = "full" if error.errno in _FULL else "error"
    return f"disk {problem} at {error.filename or path}: {error.strerror}"


class BufferedLogHandler(logging.Handler):
    """Writes the supervisor's log; failed writes are buffered and repeated later, in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.lines = BufferedLineWriter(path, lambda message: print(message, file=sys.stderr))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append_lines(self.format(record))


class BufferedStorage(RunStorage):
    """Buffers failed writes of a run and its tasks, treats them as written, and retries them."""

    def __init__(self, folder: Path) -> None:
        self._run = RunDir(folder)
        self._lines: dict[Path, BufferedLineWriter] = {}
        self._files: dict[Path, str] = {}
        self._folders: set[Path] = set()
        self._retrying = system.Lock()

    @property
    def pending_reason(self) -> str | None:  # type: ignore[override]
        for path, lines in list(self._lines.items()):
            if (error := lines.last_error) is not None:
                return describe_disk_error(error, path.parent) or f"{path.parent}: {error.strerror}"
        return None

    def append(self, path: Path, record: Mapping[str, Any]) -> None:
        self._lines.setdefault(path, BufferedLineWriter(path, log.warning)).append(record)
        self._start_retrying()

    def read_events(self, path: Path) -> Iterator[Event]:
        if (lines := self._lines.get(path)) is None or not lines.has_pending:
            return iter(_retry(lambda: list(super(BufferedStorage, self).read_events(path)), _AWAY))
        with lines.pending() as pending:
            try:
                written = list(super().read_events(path))
            except OSError as error:
                log.warning("cannot read %s: %s", path, error)
                written = []
        return iter([*written, *(decode(line, Event) for line in pending)])

    def write(self, path: Path, content: str) -> None:
        try:
            super().write(path, content)
        except OSError as error:
            log.warning("cannot write %s (%s); will retry", path, error)
            self._files[path] = content
            self._start_retrying()

    def make_folder(self, path: Path) -> None:
        """Create a new folder, if possible; raise `FileExistsError` if it exists."""
        # Without the run folder, ranks would start over and write to the wrong place.
        try:
            _retry(lambda: os.stat(self._run.spec), (*_AWAY, errno.ENOENT))
        except OSError:
            raise HpctrainError(
                f"The run folder {str(self._run)!r} or its {self._run.spec.name} no longer exists, or the "
                "file system is unavailable. Restore the folder, then submit the run again."
            ) from None
        try:
            super().make_folder(path)
        except FileExistsError:
            raise
        except OSError as error:
            log.warning("cannot create the folder %s: %s", path, error)
        self._folders.add(path)

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder, including folders that could not be created."""
        names = _retry(lambda: super(BufferedStorage, self).names(folder), _AWAY)
        return [*{*names, *(path.name for path in self._folders if path.parent == folder)}]

    def flush_pending(self, limit_s: float = FLUSH_TIMEOUT_S) -> None:
        """Write the buffered data within `limit_s` seconds; print the lines that could not be written."""
        deadline = system.monotonic() + limit_s
        while not self._flush():
            if system.monotonic() > deadline:
                break
            system.sleep(min(_RETRY_INTERVAL_S, limit_s))
        for path, lines in list(self._lines.items()):
            with lines.pending() as pending:
                for line in pending:
                    print(f"hpctrain: this line could not be written to {path}: {line}", file=sys.stderr)

    @property
    def _is_waiting(self) -> bool:
        return bool(self._files) or any(lines.has_pending for lines in list(self._lines.values()))

    def _flush(self) -> bool:
        """Write the buffered data, as far as possible. Returns True if no data remains."""
        for lines in list(self._lines.values()):
            lines.flush()
        for path, content in list(self._files.items()):
            try:
                super().write(path, content)
            except OSError:
                return False
            self._files.pop(path, None)
        return not self._is_waiting

    def _start_retrying(self) -> None:
        if self._is_waiting and self._retrying.acquire(blocking=False):
            system.Thread(target=self._retry_until_written, name="hpctrain-record", daemon=True).start()

    def _retry_until_written(self) -> None:
        try:
            while not self._flush():
                system.sleep(_RETRY_INTERVAL_S)
        finally:
            self._retrying.release()


def _retry(action: Callable[[], _T], errors: tuple[int, ...]) -> _T:
    """Repeat an action while the file system is briefly unreachable."""
    deadline = system.monotonic() + _VANISHED_LIMIT_S
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in errors or system.monotonic() > deadline:
                raise
            log.warning("cannot read the run folder (%s); will retry", error)
        system.sleep(_RETRY_INTERVAL_S)
