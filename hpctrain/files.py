"""Small file helpers: atomic replacement, append-only JSON lines, a lock that a process holds."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: A look at a lock takes microseconds; others may come in between.
_LOOK_S = 0.1


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace the file at `path` by `content`: a reader sees the old one or the new, never a part.

    Args:
        path: the file.
        content: what it holds then.
        durable: wait until it survives a power cut, which takes milliseconds.

    Raises:
        OSError: the folder is not writable or the disk is full; the old file is then untouched.
    """
    replace_files({path: content}, durable=durable)


def replace_files(contents: Mapping[Path, str | bytes], *, durable: bool = True) -> None:
    """Replace several files, each as `write_atomic` does; their folder is waited for once.

    Raises:
        OSError: a folder is not writable or the disk is full; files that were not replaced are untouched.
    """
    temporaries = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in contents}
    try:
        for path, content in contents.items():
            with open(temporaries[path], "wb") as file:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
    except BaseException:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        for folder in {path.parent for path in contents}:
            fsync_folder(folder)


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON object as one line. See `append_line`.

    Raises:
        OSError: the file cannot be written, or only in part: the disk is full.
    """
    append_line(path, json.dumps(record))


def append_line(path: Path, line: str) -> None:
    """Append a line, in one write, so that writers on a host do not mix.

    Where a crash or a full disk has cut the last line of the file, this one stands on a line of its own.

    Raises:
        OSError: the file cannot be written, or only in part: the disk is full.
    """
    append_lines(path, deque([line]))


def append_lines(path: Path, lines: deque[str]) -> None:
    """Append lines as `append_line` does each, and take those out of `lines` that are written.

    Raises:
        OSError: the file cannot be written, or only in part: the disk is full.
    """
    if not lines:
        return
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        end_before = b"\n" if _is_torn(fd) else b""
        while lines:
            data = end_before + f"{lines[0]}\n".encode(errors="backslashreplace")
            if (written := os.write(fd, data)) != len(data):
                raise OSError(
                    errno.ENOSPC, f"only {written} of {len(data)} bytes could be written", str(path)
                )
            lines.popleft()
            end_before = b""
    finally:
        os.close(fd)


def end_torn_line(path: Path) -> None:
    """Where a crash cut the last line of the file at `path`, end it, so that the next one stands alone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND)
    except FileNotFoundError:
        return
    try:
        if _is_torn(fd):
            os.write(fd, b"\n")
    finally:
        os.close(fd)


def _is_torn(fd: int) -> bool:
    """Whether the last line of an open file has no end."""
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) not in (b"\n", b"")


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; a torn line, such as a crash leaves, is skipped, which is said.

    A file that does not exist has no objects.
    """
    try:
        file = open(path, encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if (record := parse_json_line(line, path)) is not None:
                yield record


def parse_json_line(line: str, path: Path, *, ended: bool | None = None) -> dict[str, Any] | None:
    """The object of a line of the file at `path`; None where it has none.

    That a line in the middle is torn is said once a file. One that has no end may be about to be written.

    Args:
        line: the line.
        path: where it comes from.
        ended: whether it has an end; None: as the text has it.
    """
    try:
        record = json.loads(line)
    except ValueError:
        if line.strip() and (line.endswith("\n") if ended is None else ended):
            _say_torn(path)
        return None
    return record if isinstance(record, dict) else None


@functools.cache
def _say_torn(path: Path) -> None:
    # Who submits a job has no use for it.
    import logging

    logging.getLogger(__name__).warning(
        "hpctrain: a line of %s is torn, by a crash or a full disk perhaps, and is skipped; others are read.",
        path,
    )


def try_lock(path: Path) -> int | None:
    """Take the lock file at `path`, or return None where another process holds it.

    The lock lives as long as the returned file descriptor is open in this process or in a child
    that inherited it, so a holder that dies by any cause gives it up.
    """
    fd = _beyond_standard_streams(os.open(path, os.O_RDWR | os.O_CREAT, 0o666))
    try:
        _take(fd)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock_folder(folder: Path) -> int:
    """Take the lock on a folder, which nobody else holds; it lives as `try_lock` says.

    Raises:
        OSError: the file system has no locks, or another process holds this one.
    """
    fd = _beyond_standard_streams(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    try:
        _take(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _beyond_standard_streams(fd: int) -> int:
    """`fd` under a number that no child takes for its stdin, stdout or stderr, should one be closed here."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def _take(fd: int) -> None:
    """Lock what is open as `fd`. Whoever looks with `is_locked` holds it for a moment, which is waited for.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the file system has no locks.
    """
    deadline = time.monotonic() + _LOOK_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_S / 20)


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock file, or the lock on the folder, at `path`."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
