"""Writes the large files of a checkpoint, with their checksums, while the ranks wait for each other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hpctrain.checkpoint.agreement import Agreement
from hpctrain.checkpoint.errands import Errand, wait_for_all
from hpctrain.checkpoint.manifest import FileEntry
from hpctrain.errors import CheckpointError

#: Written, and added to the checksum, at a time: both let go of Python's lock meanwhile.
_BLOCK_BYTES = 8 << 20
#: So much is handed to the disk at a time, that a slow one is seen to make progress.
_FLUSH_BYTES = 256 << 20


class GivenUp(CheckpointError):
    """A rank asked for the save to be given up."""


@dataclass(frozen=True)
class Part:
    """A file to write."""

    name: str
    blocks: Callable[[], Iterator[memoryview]]


def of_memory(name: str, content: memoryview) -> Part:
    """A file with this content."""

    def blocks() -> Iterator[memoryview]:
        for begin in range(0, len(content), _BLOCK_BYTES):
            yield content[begin : begin + _BLOCK_BYTES]

    return Part(name, blocks)


def of_file(path: Path) -> Part:
    """A copy of the file at `path`."""

    def blocks() -> Iterator[memoryview]:
        buffer = memoryview(bytearray(_BLOCK_BYTES))
        with open(path, "rb", buffering=0) as file:
            while size := file.readinto(buffer):
                yield buffer[:size]

    return Part(path.name, blocks)


class Writing(Errand[list[FileEntry]]):
    """Writes files into a folder, in the background; its result is what it has written."""

    def __init__(self, folder: Path, parts: Sequence[Part], *, durable: bool, ready: Any = None) -> None:
        """Prepare to write; `start` begins it.

        Args:
            folder: where to.
            parts: what.
            durable: wait until it survives a power cut.
            ready: something to `synchronize()` with before anything is read; or None.
        """
        super().__init__()
        self._folder, self._parts, self._durable, self._ready = folder, parts, durable, ready

    def start(self) -> None:
        """Begin, in a thread of its own."""
        threading.Thread(target=self.run, name="hpctrain-checkpoint-writing", daemon=True).start()

    def work(self) -> list[FileEntry]:
        if self._ready is not None:
            self._ready.synchronize()
        return [self._write(part) for part in self._parts]

    def _write(self, part: Part) -> FileEntry:
        digest, size, flushed = xxhash.xxh3_128(), 0, 0
        with open(self._folder / part.name, "xb", buffering=0) as file:
            for block in part.blocks():
                if self.stop.is_set():
                    break
                digest.update(block)
                rest = block
                while rest:
                    rest = rest[file.write(rest) :]
                    self.moved_at = time.monotonic()
                size += len(block)
                if self._durable and size - flushed >= _FLUSH_BYTES:
                    os.fdatasync(file.fileno())
                    self.moved_at, flushed = time.monotonic(), size
            if self._durable:
                os.fsync(file.fileno())
        return FileEntry(part.name, size, digest.hexdigest())


def write_together(
    agreement: Agreement, writing: Writing, give_up: threading.Event, *, patience_s: float, failure: str
) -> list[FileEntry]:
    """Have all ranks write their files; return when all have ended, on all ranks alike.

    When this returns or raises, nobody writes any more, but for a disk that hangs.

    Args:
        agreement: the ranks.
        writing: this rank's files; is started.
        give_up: asks all ranks to give up, when set on any.
        patience_s: how long a disk may take nothing, in seconds.
        failure: what it means where it fails, as the beginning of a sentence.

    Raises:
        CheckpointError: on all ranks, where any could not write.
        GivenUp: on all ranks, where any asked for it.
    """
    writing.start()
    try:
        given_up = wait_for_all(agreement, writing, give_up, patience_s=patience_s, failure=failure)
    finally:
        # Ended already, unless the ranks have lost touch, or the disk hangs.
        writing.stop.set()
    agreement.raise_alike(writing.problem, failure)
    if given_up:
        raise GivenUp(f"{failure}: it was given up.")
    assert writing.result is not None
    return writing.result
