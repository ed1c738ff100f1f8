"""The manifest: written last, it is what makes a folder a checkpoint. Imports no torch."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.errors import BrokenCheckpoint, CheckpointError
from hpctrain.files import write_atomic
from hpctrain.rundir import step_name, steps_in

MANIFEST_NAME = "manifest.json"
_FORMAT = 1
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint, as it was when it was written."""

    name: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    """Completed optimizer steps."""
    world_size: int
    """Number of ranks that wrote it."""
    time: float
    """When it was committed, in seconds since the epoch."""
    files: tuple[FileEntry, ...]

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder`, whose other files are already on disk."""
        write_atomic(folder / MANIFEST_NAME, json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest in `folder`.

        Raises:
            BrokenCheckpoint: there is none, or it is garbled.
            CheckpointError: it cannot be read now, or was written by another version.
        """
        path = folder / MANIFEST_NAME
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise BrokenCheckpoint(
                f"{folder} has no {MANIFEST_NAME}: its writing was never finished."
            ) from None
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            record = json.loads(content)
            if record["format"] != _FORMAT:
                raise CheckpointError(
                    f"{path} has format {record['format']!r}; this hpctrain reads format {_FORMAT}. "
                    "Resume with the hpctrain that wrote it."
                )
            files = tuple(
                FileEntry(str(f["name"]), int(f["bytes"]), int(f["crc32"])) for f in record["files"]
            )
            return cls(int(record["step"]), int(record["world_size"]), float(record["time"]), files)
        except (ValueError, KeyError, TypeError) as error:
            raise BrokenCheckpoint(f"{path} is garbled: {type(error).__name__}: {error}.") from error

    def verify(self, folder: Path) -> None:
        """Compare every file in `folder` with its size and checksum.

        Raises:
            BrokenCheckpoint: a file is missing, shorter, longer or changed; the message names it.
            CheckpointError: a file cannot be read now.
        """
        for entry in self.files:
            path = folder / entry.name
            try:
                found = checksum(path)
            except FileNotFoundError:
                raise BrokenCheckpoint(f"{path} is missing; the manifest lists it.") from None
            except OSError as error:
                raise _unreadable(path, error) from error
            if found.bytes != entry.bytes:
                raise BrokenCheckpoint(f"{path} has {found.bytes} bytes; the manifest says {entry.bytes}.")
            if found.crc32 != entry.crc32:
                raise BrokenCheckpoint(
                    f"{path} has CRC {found.crc32:08x}; the manifest says {entry.crc32:08x}."
                )


def checksum(path: Path) -> FileEntry:
    """Size and CRC-32 of the file at `path`.

    Raises:
        OSError: the file cannot be read.
    """
    crc, size = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return FileEntry(path.name, size, crc)


def verified(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, with every file compared.

    Raises:
        BrokenCheckpoint: the checkpoint is not whole; the message says why.
        CheckpointError: whether it is whole cannot be told now.
    """
    manifest = Manifest.read(folder)
    if step_name(manifest.step) != folder.name:
        raise BrokenCheckpoint(f"{folder} holds the manifest of step {manifest.step}.")
    manifest.verify(folder)
    return manifest


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {error.strerror}. Nothing was changed. "
        "See to the file system, and start again."
    )


def committed_steps(checkpoints: Path) -> Iterator[int]:
    """Steps in the folder `checkpoints` that have a manifest, newest first; files are not compared."""
    for step in reversed(steps_in(checkpoints)):
        if (checkpoints / step_name(step) / MANIFEST_NAME).is_file():
            yield step
