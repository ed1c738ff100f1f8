"""Detection of new checkpoints written by the script itself.

The `Trainer` reports its own checkpoints. Other checkpoints are detected as new or changed files in the run's
`checkpoints` folder, or files that match the pattern of `--checkpoints`.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hpctrain.checkpoint.io.checkpoint_dir import is_checkpoint_entry

#: Search depth: files in the folder and in its direct subfolders.
_DEPTH = 2


class ScriptCheckpointWatcher:
    def __init__(self, folder: Path, pattern: str | None = None) -> None:
        """Watch a folder, and files elsewhere that match a pattern."""
        self._folder, self._pattern = folder, pattern
        self._before = _find_files(folder, pattern)

    def newest_since(self) -> Path | None:
        """Return the entry of the folder with the newest file added or changed since the start."""
        files = _find_files(self._folder, self._pattern)
        return _newest_entry(
            self._folder, {path: at for path, at in files.items() if self._before.get(path) != at}
        )


def newest_script_checkpoint(folder: Path, pattern: str | None = None) -> tuple[Path, float] | None:
    """Return the file or subfolder that changed last, and the time in seconds since the epoch, if any."""
    files = _find_files(folder, pattern)
    newest = _newest_entry(folder, files)
    return None if newest is None else (newest, max(files.values())[0] / 1e9)


def _find_files(folder: Path, pattern: str | None) -> dict[Path, tuple[int, int]]:
    files = dict(_iter_files(folder, _DEPTH))
    for name in glob.iglob(pattern, recursive=True) if pattern else ():
        with suppress(OSError):
            status = os.stat(name)
            files[Path(name)] = (status.st_mtime_ns, status.st_size)
    return files


def _newest_entry(folder: Path, files: Mapping[Path, tuple[int, int]]) -> Path | None:
    if not files:
        return None
    newest = max(files, key=lambda path: files[path])
    return folder / newest.relative_to(folder).parts[0] if newest.is_relative_to(folder) else newest


def _iter_files(folder: Path, depth: int) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Yield each file below `folder`, with its modification time in ns and its size in bytes."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if is_checkpoint_entry(entry.name):
            continue
        try:
            if not entry.is_dir():
                status = entry.stat()
                yield Path(entry.path), (status.st_mtime_ns, status.st_size)
            elif depth > 1:
                yield from _iter_files(Path(entry.path), depth - 1)
        except OSError:
            continue  # The file was removed during the scan.
