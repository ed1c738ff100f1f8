"""Commit, delete and clean up the checkpoints of a folder. Imports no torch.

A checkpoint is written into a hidden folder, which readers ignore. The rename to the final name is the
commit. Deletion starts with a rename to another hidden name. Every folder with the name of a step was
therefore complete at the time of the rename.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from hpctrain.checkpoint.io.retention import Retention
from hpctrain.errors import CheckpointError, CorruptCheckpoint
from hpctrain.files import fsync_path, is_locked, lock_folder, make_folder, own_file, write_atomic
from hpctrain.rundir import checkpoint_folder_name, list_checkpoint_steps

_SAVING, _DELETING = ".saving-", ".deleting-"
_CHECKPOINT_NAME = re.compile(r"step-\d{8,}(\.(broken|unverified)-\d+)?")
#: A hidden folder of another machine is considered abandoned after this time without a change, in seconds.
ABANDONED_AFTER_S = 600.0


def temporary_name(step: int, machine: str, token: str) -> str:
    return f"{_SAVING}{checkpoint_folder_name(step)}-{machine}-{token}"


def is_checkpoint_entry(name: str) -> bool:
    """Return true if hpctrain wrote an entry in a folder of checkpoints, complete or not."""
    return name.startswith((_SAVING, _DELETING)) or _CHECKPOINT_NAME.fullmatch(name) is not None


def new_save_token() -> str:
    return secrets.token_hex(4)


def boot_identity() -> str:
    """Return an identifier of the running system; process locks are visible only within one system."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


@dataclass(frozen=True)
class CheckpointDir:
    folder: Path
    durable: bool = True
    """True if commits must survive a power failure."""
    records: tuple[Path, ...] = ()
    """Files with records of the checkpoint, to sync to disk before a commit."""

    @contextmanager
    def temporary_folder(self, name: str) -> Iterator[Path]:
        """Create the locked hidden folder `name`; on exit, remove it unless it was committed."""
        path = self.folder / name
        is_new = not self.folder.exists()
        make_folder(self.folder)
        if is_new and self.durable:  # The run folder and its parents may be new, too.
            for parent in self.folder.parents:
                with suppress(OSError):
                    fsync_path(parent)
        path.mkdir(0o755)
        lock = None
        try:
            # Without locks, two parallel attempts could treat each other as abandoned.
            with suppress(OSError):
                lock = lock_folder(path)
            self._remove_stale(path)
            yield path
        finally:
            if lock is not None:
                os.close(lock)
            shutil.rmtree(path, ignore_errors=True)

    def commit(self, path: Path, step: int, files: Mapping[str, bytes]) -> bool:
        """Write the small files, manifest last, and rename the folder; False if the step exists."""
        for name in sorted(files, key=lambda name: name == MANIFEST_NAME):
            with open(path / name, "xb", opener=own_file) as file:
                file.write(files[name])
                file.flush()
                if self.durable:
                    os.fsync(file.fileno())
        if self.durable:
            fsync_path(path)
            for record in self.records:
                with suppress(OSError):  # a checkpoint without metrics is better than no checkpoint
                    fsync_path(record)
            fsync_path(self.folder.parent)  # the names of the records
        final = self.folder / checkpoint_folder_name(step)
        if final.exists():
            return False
        path.rename(final)
        if self.durable:
            fsync_path(self.folder)
        return True

    def steps(self) -> list[int]:
        return list_checkpoint_steps(self.folder)

    def prune(self, newest: int, retention: Retention) -> list[str]:
        """Delete checkpoints before `newest`, if that is complete, that no rule retains; return messages."""
        try:
            manifest = Manifest.read(self.folder / checkpoint_folder_name(newest))
            for entry in manifest.files:
                size = (self.folder / checkpoint_folder_name(newest) / entry.name).stat().st_size
                if size != entry.bytes:
                    raise CorruptCheckpoint(f"{entry.name} is {size} bytes long, not {entry.bytes}")
        except (OSError, CheckpointError) as error:
            reason = str(error).rstrip(".")
            return [f"No old checkpoint was deleted, because the new one may be damaged: {reason}."]
        manifests: dict[int, Manifest] = {}
        for step in list_checkpoint_steps(self.folder):
            with suppress(CheckpointError):
                manifests[step] = Manifest.read(self.folder / checkpoint_folder_name(step))
        retained = retention.steps_to_keep(
            {step: manifest.score_by(retention.metric) for step, manifest in manifests.items()},
            not_finite={step for step, manifest in manifests.items() if manifest.finite is False},
            verified_step=manifest.verified_step,
        )
        notes = []
        for step in sorted(manifests.keys() - retained):
            if step < newest:
                try:
                    self.delete(step)
                except FileNotFoundError:
                    continue  # deleted by another process
                except OSError as error:
                    path = self.folder / checkpoint_folder_name(step)
                    notes.append(f"{path} is no longer needed, but could not be deleted: {error.strerror}.")
        return notes

    def add_score(self, step: int, score: float, metric: str | None) -> None:
        folder = self.folder / checkpoint_folder_name(step)
        content = replace(Manifest.read(folder), score=score, metric=metric).encode()
        write_atomic(folder / MANIFEST_NAME, content, durable=self.durable)

    def delete(self, step: int) -> None:
        hidden = self.folder / f"{_DELETING}{checkpoint_folder_name(step)}-{new_save_token()}"
        (self.folder / checkpoint_folder_name(step)).rename(hidden)
        shutil.rmtree(hidden)

    def discard(self, step: int) -> None:
        with suppress(OSError):
            self.delete(step)

    def quarantine(self, step: int, suffix: str = "broken") -> Path:
        folder = self.folder / checkpoint_folder_name(step)
        taken = {entry.name for entry in self.folder.iterdir()}
        free = next(i for i in range(len(taken) + 1) if f"{folder.name}.{suffix}-{i}" not in taken)
        return folder.rename(folder.with_name(f"{folder.name}.{suffix}-{free}"))

    def _remove_stale(self, current: Path) -> None:
        """Remove remaining files of killed saves and deletions, as far as possible."""
        current_time = current.stat().st_mtime  # on the clock of the file system
        for path in self.folder.glob(f"{_DELETING}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f"{_SAVING}*"):
            if path != current and _is_abandoned(path, current_time):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path, current_time: float) -> bool:
    try:
        if path.name.split("-")[-2] == boot_identity():
            return not is_locked(path)
        changes = [path.stat().st_mtime, *(entry.stat().st_mtime for entry in path.iterdir())]
    except (OSError, IndexError):
        return False
    return current_time - max(changes) > ABANDONED_AFTER_S
