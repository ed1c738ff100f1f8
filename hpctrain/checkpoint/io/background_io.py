"""Run disk operations that may hang in threads, while all ranks wait with a time limit.

A call that creates, renames or syncs a file can hang in the kernel indefinitely, regardless of signals.
Therefore, no rank makes such a call in a thread that blocks other ranks or training.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import xxhash

from hpctrain.checkpoint.format.manifest import FileEntry
from hpctrain.checkpoint.io.coordination import RankCoordinator, describe_exception
from hpctrain.files import own_file

T = TypeVar("T")

_MIN_ROUND_S, _MAX_ROUND_S = 0.001, 0.2
#: Limit on the wait for a hanging disk while a save is being aborted, in seconds.
_ABORT_TIMEOUT_S = 5.0


class IoTask(Generic[T]):
    def __init__(self, work: Callable[[], T] | None = None) -> None:
        self._work = work
        self.result: T | None = None
        self.error: str | None = None
        self.last_progress = time.monotonic()
        self.ended, self.stop = threading.Event(), threading.Event()

    def run(self) -> None:
        self.last_progress = time.monotonic()
        try:
            self.result = self.work()
        except Exception as error:  # noqa: BLE001 (reported to the ranks through `error`)
            self.error = self.error or describe_exception(error)
        finally:
            self.ended.set()

    def start(self, name: str) -> None:
        threading.Thread(target=self.run, name=name, daemon=True).start()

    def work(self) -> T | None:
        return self._work() if self._work else None

    def note_progress(self) -> None:
        self.last_progress = time.monotonic()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; return False if the disk makes no progress for `timeout_s` seconds."""
        while not self.ended.wait(max(0.0, self.last_progress + timeout_s - time.monotonic())):
            if self.is_timed_out(timeout_s):
                return False
        return True

    def is_timed_out(self, timeout_s: float) -> bool:
        """Return true and set `error` if no disk progress occurred for `timeout_s` seconds."""
        if self.ended.is_set() or time.monotonic() - self.last_progress < timeout_s:
            return False
        self.error = f"the disk has not made progress for {timeout_s:g} s"
        return True


class IoThread:
    """Queue of tasks that run one after the other, in a thread that exists only while tasks are queued.

    A task that is queued while an earlier task hangs, such as its cleanup, therefore runs later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[IoTask[Any]] = deque()
        self._is_busy = False

    def submit(self, work: Callable[[], T]) -> IoTask[T]:
        task = IoTask(work)
        with self._lock:
            self._queue.append(task)
            if self._is_busy:
                return task
            self._is_busy = True
        threading.Thread(target=self._run, name="hpctrain-checkpoint-folder", daemon=True).start()
        return task

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._is_busy = False
                    return
                task = self._queue.popleft()
            task.run()


def wait_on_all_ranks(
    coordinator: RankCoordinator,
    task: IoTask[Any] | None,
    abort: threading.Event,
    *,
    timeout_s: float,
    failure: str,
) -> bool:
    """Collective. Wait until no rank has unfinished work; return True if any rank requested an abort."""
    round_s, given_up = _MIN_ROUND_S, False
    if task is None:
        task = IoTask(lambda: None)
        task.run()
    while True:
        ended = task.ended.wait(round_s) or task.is_timed_out(timeout_s)
        unfinished, failed, giving_up = coordinator.count_flags(
            not ended, task.error is not None, abort.is_set(), waiting_for=failure
        )
        if giving_up:
            given_up, timeout_s = True, min(timeout_s, _ABORT_TIMEOUT_S)
        if failed or given_up:
            task.stop.set()
        if not unfinished:
            return given_up
        round_s = min(_MAX_ROUND_S, round_s * 1.5)


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
