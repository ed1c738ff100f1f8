"""List the checkpoints of a run by their manifests, and those of scripts by their files; without torch."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.io.checkpoint_dir import is_checkpoint_entry
from hpctrain.errors import CheckpointError, CorruptCheckpoint
from hpctrain.files import file_size
from hpctrain.record_types import Event, ScriptCheckpoint
from hpctrain.rundir import RunDir, checkpoint_folder_name, list_checkpoint_steps, rank_steps

TierName = Literal["shared", "local"]


@dataclass(frozen=True)
class CheckpointInfo:
    step: int
    path: Path
    tier: TierName
    """"shared" for the run folder, "local" for a local tier folder of this host."""
    manifest: Manifest | None
    problems: tuple[str, ...]
    newest: bool = False
    """True if a run would resume from this checkpoint: the newest valid one, preferably finite."""
    best: bool = False


@dataclass(frozen=True)
class BestMetric:
    metric: str
    mode: Literal["min", "max"]


def list_checkpoints(run: RunDir, *, verify: bool = False) -> tuple[list[CheckpointInfo], BestMetric | None]:
    """Return the checkpoints visible on this host, oldest first, and the metric that ranks them."""
    events = [event for event in run.read_events() if event.kind == "checkpoint"]
    rule = _best_metric(events)
    checkpoints = list(_inspect(run.checkpoints, "shared", verify=verify))
    for folder in _local_tier_folders(events):
        checkpoints += _inspect(folder, "local", verify=verify)
    # If a step is in both tiers, a run would load the local copy.
    checkpoints.sort(key=lambda checkpoint: (checkpoint.step, checkpoint.tier == "local"))
    return _mark_newest_and_best(checkpoints, rule), rule


def list_quarantined(run: RunDir) -> list[Path]:
    kinds = ("broken", "unverified")
    return sorted(path for kind in kinds for path in run.checkpoints.glob(f"step-*.{kind}-*"))


def _inspect(folder: Path, tier: TierName, *, verify: bool) -> Iterator[CheckpointInfo]:
    for step in list_checkpoint_steps(folder):
        path = folder / checkpoint_folder_name(step)
        manifest: Manifest | None = None
        try:
            manifest = Manifest.read(path)
            problems = tuple(_problems(manifest, path)) if verify else ()
        except CheckpointError as error:
            problems = (str(error),)
        # A running job may have deleted the checkpoint in the meantime.
        if not problems or path.is_dir():
            yield CheckpointInfo(step, path, tier, manifest, problems)


def _problems(manifest: Manifest, path: Path) -> Iterator[str]:
    for entry in manifest.files:
        try:
            entry.verify(path)
        except CorruptCheckpoint as error:
            yield str(error)


def _local_tier_folders(events: Iterable[Event]) -> list[Path]:
    folders = {Path(event.path).parent for event in events if event.tier == "local" and event.path}
    return sorted(folder for folder in folders if folder.is_dir())


def _best_metric(events: list[Event]) -> BestMetric | None:
    for event in reversed(events):
        if event.metric is not None:
            return BestMetric(event.metric, "max" if event.mode == "max" else "min")
    return None


def _mark_newest_and_best(infos: list[CheckpointInfo], rule: BestMetric | None) -> list[CheckpointInfo]:
    intact = [(info, info.manifest) for info in infos if info.manifest is not None and not info.problems]
    finite = [info for info, manifest in intact if manifest.finite is not False]
    newest = next(reversed(finite or [info for info, _ in intact]), None)
    best: int | None = None
    if rule is not None:
        scores = {info.step: manifest.score_by(rule.metric) for info, manifest in intact}
        best = next(iter(rank_steps(scores, rule.mode)), None)
    return [
        replace(info, newest=info is newest, best=info.step == best and (info, info.manifest) in intact)
        for info in infos
    ]


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
        changed = {path: at for path, at in files.items() if self._before.get(path) != at}
        return next(reversed(_group_by_entry(self._folder, changed)), None)


def newest_script_checkpoint(folder: Path, pattern: str | None = None) -> tuple[Path, float] | None:
    """Return the file or subfolder that changed last, and the time in seconds since the epoch, if any."""
    entries = _group_by_entry(folder, _find_files(folder, pattern))
    return next(((path, time_ns / 1e9) for path, time_ns in reversed(entries.items())), None)


def list_script_checkpoints(folder: Path, pattern: str | None = None) -> list[ScriptCheckpoint]:
    """Return the files and subfolders that the script has saved, oldest first."""
    entries = _group_by_entry(folder, _find_files(folder, pattern)).items()
    return [ScriptCheckpoint(str(path), time_ns / 1e9, _size_bytes(path)) for path, time_ns in entries]


def describe_unmatched(pattern: str | None) -> str | None:
    """Return a message if the pattern of `--checkpoints`, with an absolute path, matches no file."""
    if pattern is None or next(glob.iglob(pattern, recursive=True), None) is not None:
        return None
    return f"no file matches {pattern} (--checkpoints); if the script has saved any, correct the pattern"


def _find_files(folder: Path, pattern: str | None) -> dict[Path, tuple[int, int]]:
    files = dict(_iter_files(folder, _DEPTH))
    for name in glob.iglob(pattern, recursive=True) if pattern else ():
        with suppress(OSError):
            status = os.stat(name)
            files[Path(name)] = (status.st_mtime_ns, status.st_size)
    # `**` also matches the folders of the files.
    folders = {folder, *(parent for path in files for parent in path.parents)}
    return {path: facts for path, facts in files.items() if path not in folders}


def _group_by_entry(folder: Path, files: Mapping[Path, tuple[int, int]]) -> dict[Path, int]:
    """Return the entries of the folder, and the other files, by their last change in ns, oldest first."""
    entries: dict[Path, int] = {}
    for path in sorted(files, key=lambda path: files[path]):
        entry = folder / path.relative_to(folder).parts[0] if path.is_relative_to(folder) else path
        entries.pop(entry, None)
        entries[entry] = files[path][0]
    return entries


def _size_bytes(path: Path) -> int:
    return sum(file_size(file) for file in (path, *path.rglob("*")) if not file.is_dir())


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
