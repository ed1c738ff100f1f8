"""Copy a file or folder, or unpack an archive, on the local disk: complete, or absent."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from hpctrain.cluster.parent_death import die_with_parent
from hpctrain.errors import StagingError
from hpctrain.files import REMOVE_COMMAND, read_json, write_atomic
from hpctrain.rundir import ARCHIVE_SUFFIX
from hpctrain.text import format_size

#: Concurrent operations, because each may take milliseconds on a shared file system.
_NUM_THREADS = 16
#: Maximum number of tasks of these threads, because each requires memory.
_NUM_TASKS = 1024
_BLOCK_BYTES = 4 * 1024**2
_TAR_BLOCK_BYTES = 512
#: Name of a compiled module that Python is writing, and renames at once.
_UNFINISHED_MODULE = re.compile(r"__pycache__/[^/]+\.pyc\.\d+$")

#: Relative path, size in bytes, modification time in nanoseconds, and mode; only path and type of a folder.
_Entry = tuple[str, int, int, int]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Contents(NamedTuple):
    """Files, links and folders in a folder, without the `skipped` ones, or a single file."""

    path: Path
    skipped: Container[str]
    entries: list[_Entry]

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size, *_ in self.entries)

    @property
    def fingerprint(self) -> str:
        """Checksum of names, sizes, times and modes, without caches of compiled modules."""
        entries = [entry for entry in self.entries if "__pycache__" not in entry[0]]
        return xxhash.xxh3_128_hexdigest(json.dumps(entries).encode())


def list_contents(path: Path, skipped: Container[str] = ()) -> Contents:
    """List a file or folder, without folders whose name is in `skipped`.

    A link to a file outside counts as that file.
    """

    def fail(error: OSError) -> None:
        raise error

    root, folders = str(path), list[_Entry]()
    files = [] if path.is_dir() else ["."]
    for parent, subfolders, names in os.walk(root, onerror=fail) if path.is_dir() else ():
        inside = os.path.relpath(parent, root)
        subfolders[:] = sorted(name for name in subfolders if name not in skipped)
        links = [name for name in subfolders if os.path.islink(os.path.join(parent, name))]
        folders += [
            (os.path.join(inside, name), 0, 0, stat.S_IFDIR) for name in subfolders if name not in links
        ]
        paths = [os.path.join(inside, name) for name in (*links, *sorted(names))]
        files += [name for name in paths if not _UNFINISHED_MODULE.search(name)]
    return Contents(path, skipped, folders + _map_in_threads(lambda name: _entry(root, name), files))


def _map_in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    size = len(items) // _NUM_TASKS + 1
    tasks = (items[first : first + size] for first in range(0, len(items), size))
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return list(chain.from_iterable(pool.map(lambda task: [*map(function, task)], tasks)))


def _entry(root: str, name: str) -> _Entry:
    path = os.path.normpath(os.path.join(root, name))
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode) and os.path.isabs(target := _link_target(root, path)):
        status = os.stat(path) if os.path.isfile(target) else status
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
        raise StagingError(f"{path!r} is neither a regular file nor a folder")
    return name, status.st_size, status.st_mtime_ns, status.st_mode


def _link_target(root: str, link: str) -> str:
    """Return the target of a link: relative if it is inside `root`, and absolute otherwise."""
    real = os.path.realpath(link)
    if real.startswith(os.path.realpath(root) + os.sep):
        return os.path.relpath(real, os.path.realpath(os.path.dirname(link)))
    return real


def stage(source: Path, target: Path, *, finish: Callable[[Path], None] | None = None) -> dict[str, Any]:
    """Copy a file or folder to `target`, or unpack an archive; reuse an unchanged copy.

    The target appears only when the copy is complete and `finish` has made the last changes.
    """
    begun = time.monotonic()
    record_path, temporary = (target.with_name(f".{target.name}.{kind}") for kind in ("json", "part"))
    before = list_contents(source)
    try:
        record = read_json(record_path)
        if [record["source"], record["copy"]] == [before.fingerprint, list_contents(target).fingerprint]:
            seconds = time.monotonic() - begun
            saved_s = max(0.0, record["seconds"] - seconds)
            return {**record, "reused": True, "seconds": seconds, "saved_s": saved_s}
    except (OSError, ValueError, KeyError, StagingError):
        pass  # There is no complete copy.
    remove(record_path, target, temporary)
    if before.size_bytes > (free := shutil.disk_usage(target.parent).free):
        raise StagingError(
            f"{str(source)!r} requires {format_size(before.size_bytes)}, but {str(target.parent)!r} has only "
            f"{format_size(free)} of free space. Set TMPDIR to a larger disk (--setup)"
        )
    try:
        copy_contents(before, temporary)
        if finish is not None:
            finish(temporary)
        copy = list_contents(temporary)
    except BaseException:
        remove(temporary)
        raise
    record = {"source": before.fingerprint, "copy": copy.fingerprint, "bytes": copy.size_bytes}
    record["seconds"] = time.monotonic() - begun
    os.rename(temporary, target)
    write_atomic(record_path, json.dumps(record), durable=False)
    return {**record, "reused": False, "saved_s": 0.0}


def copy_contents(contents: Contents, target: Path) -> None:
    """Copy the listed files, or unpack an archive.

    A link to a file outside the source becomes a file; a link to a folder outside stays a link.
    """
    source = contents.path
    if is_archive := not source.is_dir() and ARCHIVE_SUFFIX.search(source.name):
        target.mkdir()
        _unpack(source, target)
    elif source.is_dir():
        target.mkdir()
    num_folders = sum(stat.S_ISDIR(mode) for *_, mode in contents.entries)
    for name, *_ in contents.entries[:num_folders]:
        os.mkdir(os.path.join(target, name))
    files = [] if is_archive else contents.entries[num_folders:]
    _map_in_threads(lambda entry: _copy(str(source), str(target), entry), files)
    if list_contents(source, contents.skipped).fingerprint != contents.fingerprint:
        raise StagingError(
            f"{str(source)!r} changed while it was copied. Keep it unchanged, and resume the run"
        )


def _copy(root: str, target: str, entry: _Entry) -> None:
    name, _size, time_ns, mode = entry
    path, copied = (os.path.normpath(os.path.join(folder, name)) for folder in (root, target))
    if stat.S_ISLNK(mode):
        os.symlink(_link_target(root, path), copied)
        return
    with open(path, "rb", buffering=0) as read, open(copied, "xb") as written:
        shutil.copyfileobj(read, written, _BLOCK_BYTES)
        os.fchmod(written.fileno(), stat.S_IMODE(mode))
    os.utime(copied, ns=(time_ns, time_ns))


def _unpack(archive: Path, target: Path) -> None:
    # tar itself refuses names outside the folder, and recognizes the compression.
    command = ["tar", "--extract", f"--file={archive}", "--no-same-owner", f"--directory={target}"]
    if archive.suffix == ".zip":
        command = [sys.executable, "-I", "-m", "zipfile", "-e", str(archive), str(target)]
    run_program(command, f"unpack {str(archive)!r}")
    # tar reports no error if an archive ends between two files. A compressed archive has a checksum.
    with archive.open("rb") as file:
        header = file.read(_TAR_BLOCK_BYTES)
        file.seek(-min(_TAR_BLOCK_BYTES, len(header)), os.SEEK_END)
        if header[257:262] == b"ustar" and file.read().strip(b"\0"):
            raise StagingError(
                f"{str(archive)!r} is incomplete: its end-of-archive marker is missing. Create it again"
            )


def run_program(command: Sequence[str], task: str) -> None:
    """Run a program that ends with this process."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
        preexec_fn=die_with_parent,
    )
    if done.returncode:
        lines = done.stderr.splitlines()
        # The last line of a traceback is its error.
        reason = "; ".join(lines[-1:] if "Traceback" in done.stderr else lines[:3])
        raise StagingError(f"cannot {task}: {reason or f'exit code {done.returncode}'}")


def remove(*paths: Path) -> None:
    """Remove files and folders, including read-only ones; missing paths are ignored."""
    subprocess.run([*REMOVE_COMMAND, *paths], check=False)
