"""The manifest: written last, it is what makes a folder a checkpoint. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from hpctrain.errors import BrokenCheckpoint, CheckpointError
from hpctrain.rundir import step_name, steps_in

MANIFEST_NAME = "manifest.json"
_FORMAT = 1
_BLOCK_BYTES = 8 << 20
#: Stands before the manifest's own checksum, which is of all bytes before this.
_SEAL = b',\n"xxh3_128": "'


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint, as it was when it was written."""

    name: str
    bytes: int
    xxh3_128: str
    """Its checksum, as 32 hexadecimal digits."""

    def verify(self, folder: Path) -> None:
        """Compare the file in `folder` with its size and checksum.

        Raises:
            BrokenCheckpoint: it is missing, shorter, longer or changed; the message names it.
            CheckpointError: it cannot be read now.
        """
        path = folder / self.name
        try:
            found = checksum(path)
        except FileNotFoundError:
            raise BrokenCheckpoint(f"{path} is missing; the manifest lists it.") from None
        except OSError as error:
            raise _unreadable(path, error) from error
        if found.bytes != self.bytes:
            raise BrokenCheckpoint(f"{path} has {found.bytes} bytes; the manifest says {self.bytes}.")
        if found != self:
            raise BrokenCheckpoint(
                f"{path} has checksum {found.xxh3_128}; the manifest says {self.xxh3_128}."
            )


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    """Completed optimizer steps."""
    world_size: int
    """Number of ranks that wrote it."""
    time: float
    """When the state was captured, in seconds since the epoch."""
    score: float | None
    """How good the state is by the metric that the run keeps its best checkpoints by."""
    files: tuple[FileEntry, ...]

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)

    def encode(self) -> bytes:
        """The manifest as the text of its file, whose last line is a checksum of all before it."""
        body = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).removesuffix("\n}").encode("ascii")
        return body + _tail(body)

    @classmethod
    def decode(cls, content: bytes, path: Path) -> Manifest:
        """The inverse of `encode`; `path` is where the content comes from.

        Raises:
            BrokenCheckpoint: any byte of it is not what was written.
            CheckpointError: it was written by another version.
        """
        body, _, _ = content.rpartition(_SEAL)
        if not body or content != body + _tail(body):
            raise BrokenCheckpoint(
                f"{path} is garbled: its last line is not the checksum of those before it."
            )
        try:
            record = json.loads(content)
            if record["format"] != _FORMAT:
                raise CheckpointError(
                    f"{path} has format {record['format']!r}; this hpctrain reads format {_FORMAT}. "
                    "Resume with the hpctrain that wrote it."
                )
            files = tuple(FileEntry(**entry) for entry in record["files"])
            return cls(record["step"], record["world_size"], record["time"], record["score"], files)
        except (ValueError, KeyError, TypeError) as error:
            raise BrokenCheckpoint(f"{path} is garbled: {type(error).__name__}: {error}.") from error

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest in `folder`.

        Raises:
            BrokenCheckpoint: there is none, it is garbled, or it is that of another step.
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
        manifest = cls.decode(content, path)
        if step_name(manifest.step) != folder.name:
            raise BrokenCheckpoint(f"{folder} holds the manifest of step {manifest.step}.")
        return manifest

    def shares(self, num_ranks: int) -> list[list[FileEntry]]:
        """The files dealt out to `num_ranks` ranks, so that all have about as many bytes to read."""
        shares: list[list[FileEntry]] = [[] for _ in range(num_ranks)]
        loads = [0] * num_ranks
        for entry in sorted(self.files, key=lambda entry: (-entry.bytes, entry.name)):
            rank = loads.index(min(loads))
            shares[rank].append(entry)
            loads[rank] += entry.bytes
        return shares


def entry_of(name: str, content: bytes) -> FileEntry:
    """The entry of a file that holds `content`."""
    return FileEntry(name, len(content), xxhash.xxh3_128_hexdigest(content))


def checksum(path: Path) -> FileEntry:
    """Size and checksum of the file at `path`.

    Raises:
        OSError: the file cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileEntry(path.name, size, digest.hexdigest())


def verified(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, with every file compared.

    Raises:
        BrokenCheckpoint: the checkpoint is not whole; the message says why.
        CheckpointError: whether it is whole cannot be told now.
    """
    manifest = Manifest.read(folder)
    for entry in manifest.files:
        entry.verify(folder)
    return manifest


def committed_steps(checkpoints: Path) -> Iterator[int]:
    """Steps in the folder `checkpoints` that have a manifest, newest first; files are not compared."""
    for step in reversed(steps_in(checkpoints)):
        if (checkpoints / step_name(step) / MANIFEST_NAME).is_file():
            yield step


def _tail(body: bytes) -> bytes:
    return _SEAL + xxhash.xxh3_128_hexdigest(body).encode("ascii") + b'"\n}\n'


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {error.strerror}. Nothing was changed. "
        "See to the file system, and start again."
    )
