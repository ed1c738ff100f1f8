"""Checkpoints that a script writes by its own means: whether an attempt has brought a new one.

The `Trainer` tells of its checkpoints itself. Of others it is only seen that files in the run's `checkpoints`
folder have come or changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hpctrain.checkpoint.place import is_of_a_store

#: Files in the folder, and in folders in it: that is where they are looked for, and not below.
_DEPTH = 2


class ScriptCheckpoints:
    """What lies in a run's `checkpoints` folder, now and later."""

    def __init__(self, folder: Path) -> None:
        """Look at what is there now."""
        self._folder = folder
        self._before = dict(_look(folder, _DEPTH))

    def newest_since(self) -> Path | None:
        """What has come or changed since, the latest of it; None where nothing has.

        Changes count and not times: the clock of a file system may be another one than that of its host.
        """
        changed = {path: at for path, at in _look(self._folder, _DEPTH) if self._before.get(path) != at}
        return max(changed, key=lambda path: changed[path]) if changed else None


def _look(folder: Path, depth: int) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Yield each file below `folder`, with the time of its last change in ns and its size in bytes."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if is_of_a_store(entry.name):
            continue
        try:
            if not entry.is_dir():
                status = entry.stat()
                yield Path(entry.path), (status.st_mtime_ns, status.st_size)
            elif depth > 1:
                yield from _look(Path(entry.path), depth - 1)
        except OSError:
            continue  # It was removed meanwhile.
