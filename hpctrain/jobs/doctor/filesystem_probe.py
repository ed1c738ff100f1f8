"""Capabilities of a folder's file system, probed in a temporary folder: `python -m … FOLDER` prints JSON.

Runs in a separate process, because an unresponsive file server blocks the process that accesses it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from hpctrain.files import append_json_line, is_locked, read_json_lines, try_lock, write_atomic
from hpctrain.jobs.site.mounts import find_mount, is_node_local

PREFIX = ".hpctrain-doctor-"


def probe_folder(folder: Path) -> dict[str, object]:
    """Return facts about the file system of `folder`, or of its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    mount = find_mount(folder)
    facts: dict[str, object] = {
        "folder": str(folder),
        "mount": asdict(mount) | {"is_shared": mount.is_shared} if mount else None,
        "per_node": is_node_local(folder),
        "free_bytes": (stat := os.statvfs(folder)).f_bavail * stat.f_frsize,
    }
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder) as temporary:
            place = Path(temporary)
            for name, attempt in {"lock": _lock, "rename": _rename, "append": _append}.items():
                facts[name] = _words(attempt, place)
            facts["clock_ahead_s"] = _clock_ahead_s(place)
    except OSError as error:
        facts["write"] = error.strerror or str(error)
    return facts


def _words(attempt: Callable[[Path], str], place: Path) -> str:
    """Return the reason for a failed attempt; empty if it succeeded."""
    try:
        return attempt(place)
    except OSError as error:
        return error.strerror or str(error)


def _lock(place: Path) -> str:
    path = place / "lock"
    lock = try_lock(path)
    if lock is None:
        return "a new lock file is already locked"
    try:
        if not is_locked(path) or try_lock(path) is not None:
            return "two processes can hold the same lock"
    finally:
        os.close(lock)
    return "a lock remains after it is released" if is_locked(path) else ""


def _rename(place: Path) -> str:
    path = place / "file"
    for text in ("old", "new"):
        write_atomic(path, text)
    if path.read_text() != "new":
        return "after a rename over an existing file, the file still has the old content"
    folders = [place / "from", place / "to"]
    folders[0].mkdir()
    os.rename(*folders)
    return "" if folders[1].is_dir() else "a renamed folder is not found"


def _append(place: Path) -> str:
    path = place / "lines"
    for number in range(3):
        append_json_line(path, {"number": number})
    read = [record["number"] for record in read_json_lines(path)]
    return "" if read == [0, 1, 2] else "appended lines are lost or in the wrong order"


def _clock_ahead_s(place: Path) -> float:
    """Return the seconds by which the file system's clock is ahead of this machine's."""
    path = place / "clock"
    before = time.time()
    path.touch()
    return round(path.stat().st_mtime - (before + time.time()) / 2, 3)


def main() -> None:
    """Print the facts about the folder given on the command line."""
    # The default handler would not remove the temporary folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(json.dumps(probe_folder(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
