"""A folder that checkpoints lie in: how one comes into it, and how one goes. Imports no torch.

A checkpoint is written into a hidden folder, which no reader looks for; the rename to its final name is the
commit. It goes by being renamed to another hidden name first. So whatever carries the name of a step was
whole when it got it.
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

from hpctrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from hpctrain.checkpoint.retention import Retention
from hpctrain.errors import BrokenCheckpoint, CheckpointError
from hpctrain.files import fsync_folder, is_locked, lock_folder, write_atomic
from hpctrain.rundir import step_name, steps_in

_SAVING, _DELETING = ".saving-", ".deleting-"
_SHOWN = re.compile(r"step-\d{8,}(\.broken-\d+)?")
#: A hidden folder that another machine began counts as abandoned when nothing in it changed for so long.
ABANDONED_AFTER_S = 600.0


def hidden_name(step: int, machine: str, token: str) -> str:
    """The name of the folder in which the checkpoint of a step is being written.

    Args:
        step: completed optimizer steps.
        machine: `this_machine()` of the process that makes the folder.
        token: of this save alone, so that no other save has that name, of this attempt or another.
    """
    return f"{_SAVING}{step_name(step)}-{machine}-{token}"


def is_of_a_store(name: str) -> bool:
    """Whether an entry of a folder of checkpoints is one of ours, whole or not."""
    return name.startswith((_SAVING, _DELETING)) or _SHOWN.fullmatch(name) is not None


def new_token() -> str:
    """What no other save has."""
    return secrets.token_hex(4)


def this_machine() -> str:
    """What tells this running system from any other: locks of processes are seen inside one only."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


@dataclass(frozen=True)
class Place:
    """A folder of checkpoints, as the process sees it that makes and renames folders in it."""

    folder: Path
    durable: bool = True
    """Whether what is committed has to survive a power cut."""

    @contextmanager
    def opened(self, name: str) -> Iterator[Path]:
        """Make the hidden folder `name`; at the end it is removed, unless it was committed.

        While it is open, others can tell that its writer lives.

        Raises:
            OSError: it cannot be made.
        """
        path = self.folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        path.mkdir()
        lock = None
        try:
            with suppress(
                OSError
            ):  # without locks two attempts at once could take each other's for abandoned
                lock = lock_folder(path)
            self._sweep(path)
            yield path
        finally:
            if lock is not None:
                os.close(lock)
            shutil.rmtree(path, ignore_errors=True)

    def commit(self, path: Path, step: int, files: Mapping[str, bytes]) -> bool:
        """Give the hidden folder `path`, whose large files are on disk, its other files and its final name.

        Args:
            path: the hidden folder.
            step: completed optimizer steps.
            files: the content of the other files by name; the manifest among them is written last.

        Returns:
            False where a checkpoint of this step is there already; it is then left as it is.

        Raises:
            OSError: nothing was committed.
        """
        for name in sorted(files, key=lambda name: name == MANIFEST_NAME):
            with open(path / name, "xb") as file:
                file.write(files[name])
                file.flush()
                if self.durable:
                    os.fsync(file.fileno())
        if self.durable:
            fsync_folder(path)
        final = self.folder / step_name(step)
        if final.exists():
            return False
        path.rename(final)
        if self.durable:
            fsync_folder(self.folder)
        return True

    def steps(self) -> list[int]:
        """Steps whose folders lie here, ascending; whether they are whole is not looked at."""
        return steps_in(self.folder)

    def prune(self, newest: int, retention: Retention) -> list[str]:
        """Delete the checkpoints before `newest` that no rule keeps, if that one is as its manifest says.

        What has no readable manifest is not touched, and does not count among those kept.

        Returns:
            A sentence for each that should have gone and is still there.

        Raises:
            OSError: the folder cannot be looked through.
        """
        try:
            manifest = Manifest.read(self.folder / step_name(newest))
            for entry in manifest.files:
                size = (self.folder / step_name(newest) / entry.name).stat().st_size
                if size != entry.bytes:
                    raise BrokenCheckpoint(f"{entry.name} has {size} bytes, not {entry.bytes}")
        except (OSError, CheckpointError) as error:
            return [f"No old checkpoint was deleted, for the new one cannot be trusted: {error}"]
        scores: dict[int, float | None] = {}
        for step in steps_in(self.folder):
            with suppress(CheckpointError):
                scores[step] = Manifest.read(self.folder / step_name(step)).score
        notes = []
        for step in sorted(scores.keys() - retention.kept(scores)):
            if step < newest:
                try:
                    self.delete(step)
                except FileNotFoundError:
                    continue  # gone by another hand
                except OSError as error:
                    path = self.folder / step_name(step)
                    notes.append(f"{path} is no longer needed, and cannot be deleted: {error.strerror}.")
        return notes

    def add_score(self, step: int, score: float) -> None:
        """Write into the manifest of a step how good its state is.

        Raises:
            CheckpointError: the manifest cannot be read.
            OSError: it cannot be written; the old one is untouched.
        """
        folder = self.folder / step_name(step)
        content = replace(Manifest.read(folder), score=score).encode()
        write_atomic(folder / MANIFEST_NAME, content, durable=self.durable)

    def delete(self, step: int) -> None:
        """Delete the checkpoint of a step.

        Raises:
            OSError: it is still there, or a part of it under a hidden name.
        """
        hidden = self.folder / f"{_DELETING}{step_name(step)}-{new_token()}"
        (self.folder / step_name(step)).rename(hidden)
        shutil.rmtree(hidden)

    def withdraw(self, step: int) -> None:
        """Delete the checkpoint of a step, if it is there and that is possible."""
        with suppress(OSError):
            self.delete(step)

    def set_aside(self, step: int) -> Path:
        """Rename a broken checkpoint, so that it is in nobody's way and can still be looked at.

        Raises:
            OSError: it cannot be renamed.
        """
        folder = self.folder / step_name(step)
        taken = {entry.name for entry in self.folder.iterdir()}
        free = next(i for i in range(len(taken) + 1) if f"{folder.name}.broken-{i}" not in taken)
        return folder.rename(folder.with_name(f"{folder.name}.broken-{free}"))

    def _sweep(self, own: Path) -> None:
        """Remove what killed saves and deletions have left behind. What cannot be removed is left."""
        now = own.stat().st_mtime  # by the clock of the file system
        for path in self.folder.glob(f"{_DELETING}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f"{_SAVING}*"):
            if path != own and _is_abandoned(path, now):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path, now: float) -> bool:
    """Whether nobody can be writing into the hidden folder of a save any more."""
    try:
        if path.name.split("-")[-2] == this_machine():
            return not is_locked(path)
        changes = [path.stat().st_mtime, *(entry.stat().st_mtime for entry in path.iterdir())]
    except (OSError, IndexError):
        return False
    return now - max(changes) > ABANDONED_AFTER_S
