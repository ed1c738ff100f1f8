"""The manifest of a checkpoint, which is written last and marks it as complete. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from hpctrain.errors import CheckpointError, CorruptCheckpoint
from hpctrain.files import open_regular, read_regular
from hpctrain.rundir import checkpoint_folder_name, list_checkpoint_steps

MANIFEST_NAME = "manifest.json"
#: Table of the tensors of a checkpoint, with their files.
TENSORS_NAME = "tensors.json"
#: All values of a checkpoint that are not tensors.
STATE_NAME = "state.json"
_FORMAT = 1
_BLOCK_BYTES = 8 << 20
#: Precedes the checksum of the manifest, which covers all bytes before this field.
_SEAL = b',\n"xxh3_128": "'


@dataclass(frozen=True)
class _Format:
    format: Any


@dataclass(frozen=True)
class FileEntry:
    name: str
    bytes: int
    xxh3_128: str

    def verify(self, folder: Path, on_read: Callable[[], object] = lambda: None) -> None:
        """Raise CorruptCheckpoint if the file differs, CheckpointError if it cannot be read at the moment."""
        path = folder / self.name
        try:
            actual = checksum(path, on_read)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{path} is missing, but the manifest lists it.") from None
        except OSError as error:
            raise _unreadable(path, error) from error
        if actual.bytes != self.bytes:
            raise CorruptCheckpoint(
                f"{path} is {actual.bytes} bytes long, but the manifest records {self.bytes}."
            )
        if actual != self:
            raise CorruptCheckpoint(
                f"{path} has checksum {actual.xxh3_128}, but the manifest records {self.xxh3_128}."
            )


@dataclass(frozen=True)
class Manifest:
    step: int
    world_size: int
    time: float
    score: float | None
    files: tuple[FileEntry, ...]
    finite: bool | None = None
    """True if all parameters and optimizer states are finite; None if not checked."""
    verified_step: int | None = None
    """Step up to which training was verified; None if it was not verified."""
    metric: str | None = None

    def score_by(self, metric: str | None) -> float | None:
        """Return the score if it is of `metric`, or if one of the names is not known; otherwise None."""
        return self.score if None in (metric, self.metric) or metric == self.metric else None

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)

    def encode(self) -> bytes:
        """Return the text of the manifest file; the last line is a checksum of all preceding bytes."""
        body = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).removesuffix("\n}").encode("ascii")
        return body + _tail(body)

    @classmethod
    def decode(cls, content: bytes, path: Path) -> Manifest:
        """Parse the output of `encode` from `path`; any changed byte raises CorruptCheckpoint."""
        from hpctrain.record_types import decode

        body, _, _ = content.rpartition(_SEAL)
        if not body or content != body + _tail(body):
            raise CorruptCheckpoint(
                f"{path} is corrupt: the last line is not the checksum of the preceding lines."
            )
        try:
            if (version := decode(content, _Format).format) != _FORMAT:
                raise CheckpointError(
                    f"{path} has format {version!r}, but this version of hpctrain reads only format "
                    f"{_FORMAT}. Use the version that wrote the checkpoint."
                )
            return decode(content, cls)
        except ValueError as error:
            raise CorruptCheckpoint(f"{path} is corrupt: {error}.") from error

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest; raise CorruptCheckpoint or, if it is unreadable now, CheckpointError."""
        path = folder / MANIFEST_NAME
        try:
            content = read_regular(path)
        except FileNotFoundError:
            raise CorruptCheckpoint(
                f"{folder} has no {MANIFEST_NAME}: the checkpoint was not written completely."
            ) from None
        except OSError as error:
            raise _unreadable(path, error) from error
        manifest = cls.decode(content, path)
        if checkpoint_folder_name(manifest.step) != folder.name:
            raise CorruptCheckpoint(
                f"{folder} is corrupt: its manifest is for step {manifest.step}, which does not match the "
                "folder name."
            )
        return manifest

    def shares(self, num_ranks: int) -> list[list[FileEntry]]:
        """Divide the files among `num_ranks` ranks, with about the same number of bytes each."""
        shares: list[list[FileEntry]] = [[] for _ in range(num_ranks)]
        loads = [0] * num_ranks
        for entry in sorted(self.files, key=lambda entry: (-entry.bytes, entry.name)):
            rank = loads.index(min(loads))
            shares[rank].append(entry)
            loads[rank] += entry.bytes
        return shares


def make_entry(name: str, content: bytes) -> FileEntry:
    return FileEntry(name, len(content), xxhash.xxh3_128_hexdigest(content))


def checksum(path: Path, on_read: Callable[[], object] = lambda: None) -> FileEntry:
    digest, size = xxhash.xxh3_128(), 0
    with open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
            on_read()
    return FileEntry(path.name, size, digest.hexdigest())


def read_verified(folder: Path) -> Manifest:
    manifest = Manifest.read(folder)
    for entry in manifest.files:
        entry.verify(folder)
    return manifest


def committed_steps(checkpoints: Path) -> Iterator[int]:
    """Yield the steps in `checkpoints` that have a manifest, newest first; files are not verified."""
    for step in reversed(list_checkpoint_steps(checkpoints)):
        if (checkpoints / checkpoint_folder_name(step) / MANIFEST_NAME).is_file():
            yield step


def _tail(body: bytes) -> bytes:
    return _SEAL + xxhash.xxh3_128_hexdigest(body).encode("ascii") + b'"\n}\n'


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {error.strerror}. No checkpoint was changed. "
        "Check the file system, then try again."
    )
