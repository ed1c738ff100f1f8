"""Replace files atomically, append JSON lines, and lock files."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from hpctrain import system

Record = TypeVar("Record")

#: Modes of a run's files. The umask controls read access; only the owner has write access, regardless of the
#: umask.
_SHARED, _PRIVATE = 0o644, 0o600
#: A check with `is_locked` takes microseconds, but several checks may follow each other.
_POLL_INTERVAL_S = 0.1
#: Removes the files and folders that follow, including read-only ones.
REMOVE_COMMAND = (
    *("/bin/sh", "-c"),
    'rm -rf -- "$@" 2>/dev/null || { chmod -R u+rwX -- "$@" 2>/dev/null; rm -rf -- "$@"; }',
    "sh",
)


def make_folder(path: Path, *, private: bool = False) -> None:
    """Create a folder of a run; an existing folder keeps its mode. Parents have the mode of the umask."""
    path.mkdir(mode=0o700 if private else 0o755, parents=True, exist_ok=True)


def make_private_folder(folder: Path, setting: str | None = None) -> None:
    """Create a folder that only this user can enter. Parents have the mode of the umask.

    The name is predictable, and other users may be able to write to the parent folder.
    """
    with suppress(FileExistsError):
        folder.mkdir(0o700, parents=True)
    status, base = folder.lstat(), folder.parent.stat()
    mode, me = stat.S_IMODE(status.st_mode), os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        kind = "symbolic link" if stat.S_ISLNK(status.st_mode) else "file"
        problem, remedy = f"is a {kind}, not a folder", f"Remove this {kind}"
    elif status.st_uid != me:
        problem, remedy = f"belongs to user {status.st_uid}, not to user {me}", "Ask its owner to remove it"
    elif mode & 0o077:
        problem, remedy = f"has mode {mode:04o}, not 0700: other users can access it", "Remove this folder"
    elif base.st_mode & stat.S_IWOTH and not base.st_mode & stat.S_ISVTX:
        problem = f"can be replaced by any user: {folder.parent} has mode {stat.S_IMODE(base.st_mode):04o}"
        remedy = f"Set the sticky bit on {folder.parent} (chmod +t)"
    else:
        return
    alternative = f", or set {setting} to another folder" if setting else ""
    raise PermissionError(f"{folder} {problem}. {remedy}{alternative}")


def own_file(path: str | Path, flags: int) -> int:
    """Open a file of a run, for `open(…, opener=own_file)`: only its owner can write it."""
    return os.open(path, flags, _SHARED)


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True, private: bool = False) -> None:
    """Replace a file atomically: a reader sees either the old or the new content."""
    replace_files({path: content}, durable=durable, private=private)


def replace_files(
    contents: Mapping[Path, str | bytes], *, durable: bool = True, private: bool = False
) -> None:
    """Replace several files, each like `write_atomic`; each folder is synced only once."""
    temporaries = {path: path.with_name(f".{path.name}.{system.getpid()}.tmp") for path in contents}
    mode = _PRIVATE if private else _SHARED
    try:
        for path, content in contents.items():
            # A process with the same pid may have left a file with another mode.
            temporaries[path].unlink(missing_ok=True)
            fd = os.open(temporaries[path], os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with open(fd, "wb") as file:
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
            fsync_path(folder)


def create_atomic(path: Path, content: bytes, writer: str) -> bool:
    """Create a private file with its content, unless it exists. Only one of several processes succeeds.

    The file is created by a hard link, which is atomic on file systems shared between hosts. It survives a
    power failure, with its folder and all of its content.
    """
    make_folder(path.parent, private=True)
    temporary = path.with_name(f".{path.name}.{writer}")
    # A killed process may have left this name as a second link to the file.
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb", opener=own_file) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        # NFS reports this error for a link whose first confirmation was lost.
        if not temporary.exists() or temporary.stat().st_nlink < 2:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    for folder in (path.parent, path.parent.parent):
        fsync_path(folder)
    return True


def fsync_path(path: Path) -> None:
    """Sync the content of a file, or the names in a folder, to survive a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_regular(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading: another user's FIFO would block, and a device may be endless."""
    no_follow = 0 if follow_links else os.O_NOFOLLOW
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | no_follow
    # The file owns the descriptor from the start, because Ctrl-C may interrupt any line.
    file = open(path, "rb", opener=lambda name, _: os.open(name, flags))
    try:
        _check_regular(file.fileno(), path)
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: Path, *, follow_links: bool = True) -> bytes:
    with open_regular(path, follow_links=follow_links) as file:
        return file.read()


def read_json(path: Path, *, follow_links: bool = True) -> dict[str, Any]:
    return parse_json_object(read_regular(path, follow_links=follow_links), str(path))


def parse_json_object(text: str | bytes, source: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except RecursionError:
        raise ValueError(f"{source} is nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"{source} does not contain a JSON object")
    return record


def parse_yaml(text: str) -> Any:
    # Imported here because most submissions read no YAML, and the import is slow.
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        # The library passes on errors of invalid dates, numbers and tagged values.
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("the content is nested too deeply") from None


def _check_regular(fd: int, path: Path) -> None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON object as one line. See `append_lines`."""
    append_lines(path, deque([json.dumps(record)]))


def append_lines(path: Path, lines: deque[str]) -> None:
    """Append lines, each in one write, because of other writers on the host; remove them from `lines`.

    A last line truncated by a crash or a full disk is terminated first.
    """
    if not lines:
        return
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, _SHARED)
    try:
        _check_regular(fd, path)
        end_before = b"\n" if _has_partial_line(fd) else b""
        while lines:
            data = end_before + f"{lines[0]}\n".encode(errors="backslashreplace")
            if (written := os.write(fd, data)) != len(data):
                raise OSError(errno.ENOSPC, f"wrote only {written} of {len(data)} bytes", str(path))
            lines.popleft()
            end_before = b""
    finally:
        os.close(fd)


def terminate_partial_line(path: Path) -> None:
    """Terminate the last line of the file at `path` if a crash truncated it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND)
    except FileNotFoundError:
        return
    try:
        _check_regular(fd, path)
        if _has_partial_line(fd):
            os.write(fd, b"\n")
    finally:
        os.close(fd)


def _has_partial_line(fd: int) -> bool:
    """True if the last line of an open file has no line end."""
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) not in (b"\n", b"")


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file. See `read_lines`."""
    return read_lines(path, lambda line: parse_json_object(line.decode(errors="replace"), str(path)))


def read_lines(
    path: Path, decode: Callable[[bytes], Record], *, follow_links: bool = True
) -> Iterator[Record]:
    """Yield the records of a file, none if it is missing; damaged lines are skipped with a warning."""
    try:
        file = open_regular(path, follow_links=follow_links)
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if (record := decode_line(line, path, decode)) is not None:
                yield record
            if not line.endswith(b"\n"):
                # A writer may add the rest now, which is no line of its own.
                return


def read_new_lines(path: Path, offset: int) -> tuple[bytes, int]:
    """Return complete lines after `offset`, at most 1 MiB, and their end; all of a replaced, shorter file."""
    with open_regular(path) as file:
        begin = offset if offset <= file.seek(0, os.SEEK_END) else 0
        file.seek(begin)
        text = file.read(1 << 20)
    text = text[: text.rfind(b"\n") + 1]
    return text, begin + len(text)


def decode_line(
    line: bytes, path: Path, decode: Callable[[bytes], Record], *, ended: bool | None = None
) -> Record | None:
    """Return the record in a line; None if it is damaged, with one warning per file, or incomplete."""
    try:
        return decode(line)
    except ValueError:
        if line.strip() and (line.endswith(b"\n") if ended is None else ended):
            warn_once(f"Skipped a damaged line in {path}, possibly truncated by a crash or a full disk.")
        return None


@functools.cache
def warn_once(text: str) -> None:
    # Imported here because submitting a job does not require logging.
    import logging

    logging.getLogger(__name__).warning("hpctrain: %s", text)


def try_lock(path: Path) -> int | None:
    """Acquire a lock file until the descriptor, also in children, is closed; None if it is held."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, _PRIVATE)
    # The file is private, because any process that can read it could lock it (flock(2)).
    if stat.S_IMODE(os.fstat(fd).st_mode) != _PRIVATE:
        os.fchmod(fd, _PRIVATE)
    with suppress(BlockingIOError):
        return _lock_fd(fd)
    return None


def lock_folder(folder: Path) -> int:
    return _lock_fd(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def _lock_fd(opened: int) -> int:
    """Lock an open file; return its new descriptor, above those of a child's stdin, stdout and stderr."""
    fd = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(opened)
    deadline = system.monotonic() + _POLL_INTERVAL_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:  # `is_locked` in another process briefly holds the lock
            if system.monotonic() > deadline:
                os.close(fd)
                raise
        except BaseException:
            os.close(fd)
            raise
        system.sleep(_POLL_INTERVAL_S / 20)


def is_locked(path: Path) -> bool:
    """True if a living process holds the lock file, or the folder lock, at `path`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def file_size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
