"""Check the runs folder: whether nodes share it, and whether locks work there.

`python -m hpctrain.jobs.doctor.folder_checks FOLDER` probes a folder and prints JSON. It is a separate
process, because an unresponsive file server blocks the process that accesses it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from hpctrain.files import is_locked, try_lock
from hpctrain.jobs.backends.mounts import find_mount, is_node_local
from hpctrain.jobs.doctor.probe import Finding, run_python_probe
from hpctrain.text import format_size

PREFIX = ".hpctrain-doctor-"
_LIMIT_S = 20.0
#: With less space, a checkpoint of a medium-sized model fills the file system.
_LITTLE_BYTES = 10 << 30
_finding = partial(Finding, "Runs folder")


def check_runs_folder(folder: Path, environ: Mapping[str, str], *, other_machines: bool) -> Iterator[Finding]:
    """Yield findings on the folder in which runs are created, which may not exist yet.

    Raises:
        ProbeFailed: the file system does not respond.
    """
    facts = run_python_probe(["-m", __name__, str(folder)], environ, _LIMIT_S)
    place = f"{facts['folder']}: {facts['mount']}"
    if not other_machines or facts["is_shared"]:
        yield _finding("file system", place)
    elif facts["per_node"]:
        remedy = (
            "This folder is local to each node. Submit from a folder that all nodes share, or use --run-dir."
        )
        yield _finding("file system", place, remedy, "problem")
    else:
        yield _finding(
            "file system",
            place,
            "This folder appears to be on a local disk. Unless the nodes mount this disk under the same "
            "path, set --run-dir to a folder that all nodes share.",
        )
    remedy = "Checkpoints usually need more space. Delete files, or choose another --run-dir."
    free = facts["free_bytes"]
    yield _finding("free space", format_size(free), remedy if free < _LITTLE_BYTES else "")
    if trouble := facts.get("write"):
        remedy = "Submit from a folder that you can write to, or use --run-dir."
        yield _finding("writing", f"not possible: {trouble}", remedy, "problem")
    elif trouble := facts["locking"]:
        remedy = (
            "Use another file system for runs (--run-dir). On this file system, two submissions could use "
            "the same run folder at the same time."
        )
        yield _finding("locking", trouble, remedy, "problem")
    else:
        yield _finding("locking", "works")


def probe_folder(folder: Path) -> dict[str, object]:
    """Return facts about the file system of `folder`, or of its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    mount, stat = find_mount(folder), os.statvfs(folder)
    facts: dict[str, object] = {
        "folder": str(folder),
        "mount": f"{mount.type} ({mount.source} on {mount.point})" if mount else "unknown",
        "is_shared": mount is not None and mount.is_shared,
        "per_node": is_node_local(folder),
        "free_bytes": stat.f_bavail * stat.f_frsize,
    }
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder) as temporary:
            facts["locking"] = _probe_lock(Path(temporary, "lock"))
    except OSError as error:
        facts["write"] = error.strerror or str(error)
    return facts


def _probe_lock(path: Path) -> str:
    """Return the problem with locks; empty if there is none."""
    try:
        if (lock := try_lock(path)) is None:
            return "a new lock file is already locked"
        try:
            if not is_locked(path) or try_lock(path) is not None:
                return "two processes can hold the same lock"
        finally:
            os.close(lock)
        return "a lock remains after it is released" if is_locked(path) else ""
    except OSError as error:
        return error.strerror or str(error)


def main() -> None:
    # The default handler would not remove the temporary folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(json.dumps(probe_folder(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
