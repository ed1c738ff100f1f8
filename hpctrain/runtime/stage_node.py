"""Copy files to the local disk of this node: `python -P -m hpctrain.runtime.stage_node PLAN`.

PLAN is a JSON object: the `folder` of the copies, the `sources` by name, and the folder of `packs`, which is
null if the Python environment is not staged. One process per node runs this program.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from hpctrain.cluster.processes import die_with_parent, die_with_supervisor
from hpctrain.errors import EXIT_CONTINUE, StagingError
from hpctrain.files import REMOVE_COMMAND, make_folder, make_private_folder, read_json, try_lock, write_atomic
from hpctrain.rundir import ARCHIVE_SUFFIX, STAGED_ENVIRONMENT, attempt_of
from hpctrain.runtime.stopping.signal_recorder import STOP_SIGNALS
from hpctrain.text import format_size

#: Between checks for another process that stages. The supervisor limits the time.
_POLL_INTERVAL_S = 0.2
#: Age in seconds at which an unused pack is removed.
_MAX_AGE_S = 30 * 86400.0
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


def main(argv: list[str], environ: Mapping[str, str]) -> int:
    """Copy everything, and write the result to the run folder. Return 1 after an error."""
    # Incomplete copies have other names. The supervisor removes them with the folder.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(EXIT_CONTINUE))
    plan, node = json.loads(argv[0]), int(environ["SLURM_NODEID"])
    run, attempt = attempt_of(environ)
    folder, result = Path(plan["folder"]), run.staging_result(attempt, node)
    staged_environment = folder / STAGED_ENVIRONMENT
    staged, error, name = {}, None, "files"
    try:
        make_private_folder(folder, "TMPDIR (--setup)")
        if plan["packs"] is not None:
            name, chosen = "the Python environment", run.staged_environment(environ["SLURM_JOB_ID"])
            pack = _choose_pack(chosen, Path(plan["packs"]), folder, is_first=node == 0)
        # Several nodes may share a disk.
        while (lock := try_lock(folder / ".lock")) is None:
            time.sleep(_POLL_INTERVAL_S)
        if plan["packs"] is not None:
            staged[name] = stage(pack, staged_environment, finish=partial(relocate, staged_environment))
        for name, source in plan["sources"].items():
            staged[name] = stage(Path(source), folder / name)
        os.close(lock)
    except (OSError, StagingError) as failure:
        error = f"cannot stage {name}: {re.sub(r'^.Errno [0-9]+. ', '', str(failure))}"
    make_folder(result.parent)
    write_atomic(result, json.dumps({"staged": staged, "error": error}) + "\n", durable=False)
    return int(error is not None)


def _choose_pack(chosen: Path, packs: Path, folder: Path, *, is_first: bool) -> Path:
    """Return the pack that the first node has recorded in `chosen`, for all attempts of this job."""
    while True:
        with suppress(OSError):
            if (pack := Path(chosen.read_text())).exists():
                return pack
        if is_first:
            pack = pack_environment(packs, folder)
            make_folder(chosen.parent)
            write_atomic(chosen, str(pack), durable=False)
        else:
            time.sleep(_POLL_INTERVAL_S)


def pack_environment(packs: Path, folder: Path) -> Path:
    """Return the packed environment, in one file that shared file systems read fast; packed if changed."""
    environment = list_contents(Path(sys.prefix))
    key = os.fsencode(f"{environment.path} {environment.fingerprint}")
    pack = packs / f"{xxhash.xxh3_128_hexdigest(key)}.tar"
    make_private_folder(packs, "--run-dir")
    with suppress(FileNotFoundError):
        # Other jobs may be copying the pack, so its modification time must not change.
        os.utime(pack, ns=(time.time_ns(), pack.stat().st_mtime_ns))
        return pack
    for old_pack in packs.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - old_pack.stat().st_atime > _MAX_AGE_S:
                old_pack.unlink()
    copy, temporary = folder / ".pack.part", packs / f".{pack.name}.{os.uname().nodename}.{os.getpid()}"
    remove(copy)
    copy.mkdir()
    try:
        copy_contents(environment, copy / "venv")
        # The interpreter of a virtual environment finds its libraries only at its own path.
        for program in (environment.path / "bin").iterdir():
            target = program.resolve()
            if program.is_symlink() and not target.is_relative_to(environment.path.resolve()):
                (copy / "venv/bin" / program.name).unlink()
                (copy / "venv/bin" / program.name).symlink_to(target)
        command = ["tar", "--create", f"--file={temporary}", f"--directory={copy}", "venv"]
        run_program(command, f"write {str(pack)!r}")
        # Another job may have created the pack, and its nodes may be copying it.
        with suppress(FileExistsError):
            os.link(temporary, pack)
    finally:
        remove(copy, temporary)
    return pack


def relocate(target: Path, copy: Path) -> None:
    """Replace the path of the original environment in a copy, which will move to `target`."""
    old, new = os.fsencode(f"{sys.prefix}/"), os.fsencode(f"{target}/venv/")
    for path in (copy / "venv/pyvenv.cfg", *(copy / "venv/bin").iterdir()):
        content = b"" if path.is_symlink() or not path.is_file() else path.read_bytes()
        is_script = content.startswith(b"#!")
        if is_script or (content and path.name == "pyvenv.cfg"):
            # pip writes a long path to the second line, after #!/bin/sh.
            head = b"\n".join(content.split(b"\n", 2)[:2]) if is_script else content
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
            path.write_bytes(head.replace(old, new) + content[len(head) :])


class Contents(NamedTuple):
    path: Path
    entries: list[_Entry]

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size, *_ in self.entries)

    @property
    def fingerprint(self) -> str:
        """Checksum of names, sizes, times and modes, without caches of compiled modules."""
        entries = [entry for entry in self.entries if "__pycache__" not in entry[0]]
        return xxhash.xxh3_128_hexdigest(json.dumps(entries).encode())


def list_contents(path: Path) -> Contents:
    """List a file or folder; a link to a file outside counts as that file."""

    def fail(error: OSError) -> None:
        raise error

    root, folders = str(path), list[_Entry]()
    files = [] if path.is_dir() else ["."]
    for parent, subfolders, names in os.walk(root, onerror=fail) if path.is_dir() else ():
        inside = os.path.relpath(parent, root)
        subfolders.sort()
        links = [name for name in subfolders if os.path.islink(os.path.join(parent, name))]
        folders += [
            (os.path.join(inside, name), 0, 0, stat.S_IFDIR) for name in subfolders if name not in links
        ]
        paths = [os.path.join(inside, name) for name in (*links, *sorted(names))]
        files += [name for name in paths if not _UNFINISHED_MODULE.search(name)]
    return Contents(path, folders + _map_in_threads(lambda name: _entry(root, name), files))


def _map_in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    size = len(items) // _NUM_TASKS + 1
    tasks = (items[start : start + size] for start in range(0, len(items), size))
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
    """Copy a file or folder to `target`, or unpack an archive, atomically; reuse an unchanged copy."""
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
    """Copy the listed files, or unpack an archive; a link to a folder outside stays a link."""
    source = contents.path
    is_archive = not source.is_dir() and ARCHIVE_SUFFIX.search(source.name)
    if is_archive or source.is_dir():
        target.mkdir()
    if is_archive:
        _unpack(source, target)
    else:
        num_folders = sum(stat.S_ISDIR(mode) for *_, mode in contents.entries)
        for name, *_ in contents.entries[:num_folders]:
            os.mkdir(os.path.join(target, name))
        copy = partial(_copy, str(source), str(target))
        _map_in_threads(copy, contents.entries[num_folders:])
    if list_contents(source).fingerprint != contents.fingerprint:
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


if __name__ == "__main__":
    die_with_supervisor(os.environ)
    raise SystemExit(main(sys.argv[1:], os.environ))
