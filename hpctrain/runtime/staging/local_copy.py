"""Copy of a file or folder, or the content of an archive, on the local disk: complete, or absent."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hpctrain.errors import HpctrainError
from hpctrain.files import read_json, write_atomic
from hpctrain.text import format_size

#: Concurrent operations, because each may take milliseconds on a shared file system.
_NUM_THREADS = 16
_BLOCK_BYTES = 4 * 1024**2
#: Options with which tar reads each kind of archive.
_TAR_OPTIONS = {
    (".tar",): (),
    (".tar.gz", ".tgz"): ("--gzip",),
    (".tar.bz2", ".tbz2"): ("--bzip2",),
    (".tar.xz", ".txz"): ("--xz",),
    (".tar.zst", ".tzst"): ("--zstd",),
}


class StagingFailed(HpctrainError):
    """A source cannot be copied."""


@dataclass(frozen=True)
class Contents:
    """Files of a file or folder."""

    files: tuple[tuple[str, int, int, int], ...]
    """Relative path, size in bytes, modification time in nanoseconds, and mode of each file or link."""
    folders: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size, *_ in self.files)

    @property
    def fingerprint(self) -> str:
        """Checksum of names, sizes, times and modes, without caches of compiled modules."""
        files = [entry for entry in self.files if "__pycache__" not in entry[0]]
        folders = [name for name in self.folders if "__pycache__" not in name]
        return _digest([files, folders])


def _digest(record: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(record).encode())


def list_contents(path: Path, skipped: Container[str] = ()) -> Contents:
    """List a file or folder, without folders whose name is in `skipped`.

    Raises:
        OSError: a file cannot be accessed.
        StagingFailed: a file is neither a regular file nor a folder or link.
    """
    if not path.is_dir():
        return Contents((_entry(str(path), "."),))
    root, names, folders = str(path), [], []
    for parent, inside, files in os.walk(root, onerror=_raise):
        inside[:] = sorted(name for name in inside if name not in skipped)
        links = [name for name in inside if os.path.islink(os.path.join(parent, name))]
        at = os.path.relpath(parent, root)
        folders += [os.path.join(at, name) for name in inside if name not in links]
        names += [os.path.join(at, name) for name in (*links, *sorted(files))]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return Contents(tuple(pool.map(lambda name: _entry(root, name), names)), tuple(folders))


def _raise(error: OSError) -> None:
    raise error


def _entry(root: str, name: str) -> tuple[str, int, int, int]:
    path = os.path.normpath(os.path.join(root, name))
    # A source may itself be a link.
    found = os.stat(path) if name == "." else os.lstat(path)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
        raise StagingFailed(f"{path!r} is neither a regular file nor a folder")
    return name, found.st_size, found.st_mtime_ns, found.st_mode


def stage(source: Path, target: Path, *, finish: Callable[[Path], None] | None = None) -> dict[str, Any]:
    """Copy a file or folder to `target`, or unpack an archive; reuse an unchanged copy.

    Args:
        source: the file, folder or archive.
        target: path of the copy. It appears only when the copy is complete.
        finish: last changes to a new copy.

    Returns:
        `bytes` and `seconds` of the copy, `digest` of the source's contents, `reused`, and `saved_s`.

    Raises:
        OSError: a file cannot be read or written.
        StagingFailed: the source changed, the archive is damaged, or the disk is too small.
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
    except (OSError, ValueError, KeyError, StagingFailed):
        pass  # There is no complete copy.
    remove(record_path, target, temporary)
    if before.size_bytes > (free := shutil.disk_usage(target.parent).free):
        sizes = f"{format_size(before.size_bytes)}, but {str(target.parent)!r} has {format_size(free)} left"
        raise StagingFailed(f"{str(source)!r} has {sizes}")
    try:
        digest = _copy(source, temporary, before)
        if list_contents(source).fingerprint != before.fingerprint:
            raise StagingFailed(f"{str(source)!r} changed while it was copied")
        if finish is not None:
            finish(temporary)
        copy = list_contents(temporary)
    except BaseException:
        remove(temporary)
        raise
    record = {"source": before.fingerprint, "copy": copy.fingerprint, "digest": digest}
    record |= {"bytes": copy.size_bytes, "seconds": time.monotonic() - begun}
    os.rename(temporary, target)
    write_atomic(record_path, json.dumps(record), durable=False)
    return {**record, "reused": False, "saved_s": 0.0}


def _copy(source: Path, target: Path, contents: Contents) -> str:
    """Copy a file or folder, or unpack an archive. Returns a checksum."""
    options = next((opts for ends, opts in _TAR_OPTIONS.items() if source.name.endswith(ends)), None)
    if source.is_dir() or (options is None and source.suffix != ".zip"):
        return copy_tree(source, target, contents)
    target.mkdir()
    return _unzip(source, target) if options is None else _untar(source, target, options)


def copy_tree(source: Path, target: Path, contents: Contents) -> str:
    """Copy the listed files. Returns a checksum of names and contents.

    A link to a file outside the source becomes a file; a link to a folder outside stays a link.

    Raises:
        OSError: a file cannot be read or written.
    """
    if source.is_dir():
        for name in (".", *contents.folders):
            os.makedirs(os.path.join(target, name), exist_ok=True)
    root = os.path.realpath(source)

    def copy(entry: tuple[str, int, int, int]) -> str:
        name, _size, _time, mode = entry
        path, copied = os.path.normpath(os.path.join(source, name)), os.path.join(target, name)
        if stat.S_ISLNK(mode):
            real = os.path.realpath(path)
            if real.startswith(f"{root}{os.sep}"):
                real = os.path.relpath(real, os.path.dirname(os.path.realpath(root) + os.sep + name))
            if not os.path.isabs(real) or not os.path.isfile(real):
                os.symlink(real, copied)
                return os.fspath(real)
        return _copy_file(path, os.path.normpath(copied))

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = pool.map(copy, contents.files)
        found = [[entry[0], digest] for entry, digest in zip(contents.files, digests, strict=True)]
    return _digest(found)


def _copy_file(source: str, target: str) -> str:
    digest = xxhash.xxh3_128()
    with open(source, "rb", buffering=0) as read, open(target, "xb", buffering=0) as written:
        while block := read.read(_BLOCK_BYTES):
            digest.update(block)
            view = memoryview(block)
            while view:
                view = view[written.write(view) :]
        found = os.fstat(read.fileno())
        os.fchmod(written.fileno(), stat.S_IMODE(found.st_mode))
        os.utime(written.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
    return digest.hexdigest()


def _untar(archive: Path, target: Path, options: tuple[str, ...]) -> str:
    """Unpack a tar archive; return its checksum. tar itself refuses names outside the folder."""
    digest = xxhash.xxh3_128()
    command = ["tar", "--extract", *options, "--file=-", "--no-same-owner", f"--directory={target}"]
    with open(archive, "rb", buffering=0) as read, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=said)
        assert process.stdin is not None
        try:
            with process.stdin as stdin:
                while block := read.read(_BLOCK_BYTES):
                    digest.update(block)
                    stdin.write(block)
        except BrokenPipeError:
            pass  # tar reports the reason.
        if process.wait():
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()
            words = "; ".join(lines[:3]) or f"exit code {process.returncode}"
            raise StagingFailed(f"cannot unpack {str(archive)!r}: {words}")
    return digest.hexdigest()


def _unzip(archive: Path, target: Path) -> str:
    """Unpack a zip archive; return a checksum of its names and the checksums in it."""
    try:
        with zipfile.ZipFile(archive) as found:
            found.extractall(target)
            members = [[member.filename, member.CRC] for member in found.infolist()]
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise StagingFailed(f"cannot unpack {str(archive)!r}: {error}") from error
    return _digest(members)


def remove(*paths: Path) -> None:
    """Remove files and folders, including read-only ones; missing paths are ignored."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            subprocess.run(["chmod", "-R", "u+rwX", "--", path], check=False)
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
