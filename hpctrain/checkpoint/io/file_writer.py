"""Writing of a checkpoint's large files and their checksums, coordinated between the ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hpctrain.checkpoint.format.manifest import FileEntry
from hpctrain.checkpoint.io.background_io import IoTask, wait_on_all_ranks
from hpctrain.checkpoint.io.coordination import RankCoordinator, SaveAborted
from hpctrain.files import own_file

#: Size of one write and checksum update; both release the GIL.
_BLOCK_BYTES = 8 << 20
#: Bytes between two syncs, to show progress on a slow disk.
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class FileWrite:
    name: str
    blocks: Callable[[], Iterator[memoryview]]


def bytes_file_write(name: str, content: memoryview) -> FileWrite:
    def blocks() -> Iterator[memoryview]:
        for begin in range(0, len(content), _BLOCK_BYTES):
            yield content[begin : begin + _BLOCK_BYTES]

    return FileWrite(name, blocks)


def file_copy_write(path: Path) -> FileWrite:
    def blocks() -> Iterator[memoryview]:
        buffer = memoryview(bytearray(_BLOCK_BYTES))
        with open(path, "rb", buffering=0) as file:
            while size := file.readinto(buffer):
                yield buffer[:size]

    return FileWrite(path.name, blocks)


class FileWriter(IoTask[list[FileEntry]]):
    """Background writer of files into a folder; the result is the list of file entries."""

    def __init__(self, folder: Path, files: Sequence[FileWrite], *, durable: bool, ready: Any = None) -> None:
        super().__init__()
        self._folder, self._files, self._durable, self._ready = folder, files, durable, ready

    def start(self) -> None:
        threading.Thread(target=self.run, name="hpctrain-checkpoint-writing", daemon=True).start()

    def work(self) -> list[FileEntry]:
        if self._ready is not None:
            self._ready.synchronize()
        return [self._write(file) for file in self._files]

    def _write(self, source: FileWrite) -> FileEntry:
        digest, size, flushed = xxhash.xxh3_128(), 0, 0
        with open(self._folder / source.name, "xb", buffering=0, opener=own_file) as file:
            for block in source.blocks():
                if self.stop.is_set():
                    break
                digest.update(block)
                unwritten = block
                while unwritten:
                    unwritten = unwritten[file.write(unwritten) :]
                    self.last_progress = time.monotonic()
                size += len(block)
                if self._durable and size - flushed >= _FLUSH_BYTES:
                    os.fdatasync(file.fileno())
                    self.last_progress, flushed = time.monotonic(), size
            if self._durable:
                os.fsync(file.fileno())
        return FileEntry(source.name, size, digest.hexdigest())


def write_on_all_ranks(
    coordinator: RankCoordinator,
    writer: FileWriter,
    abort: threading.Event,
    *,
    timeout_s: float,
    failure: str,
) -> list[FileEntry]:
    """Write the files of all ranks; afterwards, no rank is writing, unless its disk hangs (collective)."""
    writer.start()
    try:
        given_up = wait_on_all_ranks(coordinator, writer, abort, timeout_s=timeout_s, failure=failure)
    finally:
        # The writer has already ended, unless a rank was lost or the disk hangs.
        writer.stop.set()
    coordinator.raise_on_all(writer.error, failure)
    if given_up:
        raise SaveAborted(f"{failure}: the save was aborted.")
    assert writer.result is not None
    return writer.result
