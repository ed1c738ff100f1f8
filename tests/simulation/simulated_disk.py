"""File operations of simulated processes: real files below one folder, with faults."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from simulation.scheduler import EPOCH, ProcessKilled, Scheduler

_REAL = {
    name: getattr(os, name)
    for name in ("open", "write", "pwrite", "link", "replace", "mkdir", "unlink", "listdir", "fsync")
}
_WRITING = os.O_CREAT | os.O_WRONLY | os.O_RDWR | os.O_TRUNC
#: Seconds for which another host may still list the old names of a folder.
_STALE_S = 20.0


class SimDisk:
    """The disk of the run folder. Faults are windows of time, and the number of a write that is torn."""

    def __init__(self, scheduler: Scheduler, root: str) -> None:
        self.scheduler, self.root = scheduler, root
        self.windows: list[tuple[str, float, float]] = []
        self.torn_writes: set[int] = set()
        self._num_writes = 0
        self._created: dict[str, tuple[float, str]] = {}

    def has(self, fault: str) -> bool:
        now = self.scheduler.now
        return any(kind == fault and begin <= now < end for kind, begin, end in self.windows)

    def check(self, path: Any, *, writes: bool) -> None:
        if self.has("away"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        if writes and self.has("full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def access(self, path: Any, *, writes: bool = False) -> None:
        """Let a simulated process access a path: it may be delayed, refused or killed."""
        scheduler = self.scheduler
        scheduler.step()
        if self.windows:
            if scheduler.running is not None and self.has("slow"):
                scheduler.sleep(scheduler.random.choice((0.0, 0.0, 0.2, 3.0)))
            self.check(path, writes=writes)

    def write(self, call: Callable[..., int], fd: int, data: bytes, *more: int) -> int:
        self.access(self.root, writes=True)
        self._num_writes += 1
        process = self.scheduler.process
        if self._num_writes in self.torn_writes and process is not None:
            call(fd, data[: len(data) // 2], *more)
            self.scheduler.trace("torn write", process.name)
            process.end(-signal.SIGKILL)
            raise ProcessKilled
        written = call(fd, data, *more)
        moment = EPOCH + self.scheduler.now
        os.utime(fd, (moment, moment))
        return written

    def created(self, path: Any) -> None:
        process = self.scheduler.process
        if self.windows and process is not None:
            self._created[os.fspath(path)] = self.scheduler.now, process.host

    def listdir(self, path: Any) -> list[str]:
        names = _REAL["listdir"](path)
        process = self.scheduler.process
        if not self.has("stale") or process is None:
            return names
        oldest = self.scheduler.now - _STALE_S
        folder = os.fspath(path)
        return [name for name in names if not self._is_hidden(f"{folder}/{name}", oldest, process.host)]

    def _is_hidden(self, path: str, oldest: float, host: str) -> bool:
        at, by = self._created.get(path, (-1e9, host))
        return at > oldest and by != host


_disk: SimDisk | None = None


def use_disk(disk: SimDisk | None) -> None:
    """Let the file operations of simulated processes go to this disk."""
    global _disk
    _disk = disk


def _is_simulated(path: Any) -> bool:
    return (
        _disk is not None
        and Scheduler.current.process is not None
        and not isinstance(path, int)
        and os.fspath(path).startswith(_disk.root)
    )


def _with_path(name: str, at: int, action: Callable[..., None] | None = None) -> Callable[..., Any]:
    """Return the replacement of a function whose argument number `at` is the path that it accesses."""
    real = _REAL[name]

    def call(*args: Any, **more: Any) -> Any:
        if not _is_simulated(args[at]):
            return real(*args, **more)
        assert _disk is not None
        _disk.access(args[at], writes=name != "open" or bool(args[1] & _WRITING))
        result = real(*args, **more)
        if action is not None:
            action(_disk, args[at])
        return result

    return call


def _after_link(disk: SimDisk, target: Any) -> None:
    disk.created(target)
    moment = EPOCH + Scheduler.current.now
    os.utime(target, (moment, moment))
    Scheduler.current.world.on_link(os.fspath(target))


def _to_file(name: str) -> Callable[..., int]:
    def call(fd: int, data: bytes, *offset: int) -> int:
        if _disk is None or Scheduler.current.process is None:
            return int(_REAL[name](fd, data, *offset))
        return _disk.write(_REAL[name], fd, data, *offset)

    return call


def _unlink(path: Any, **more: Any) -> None:
    if _is_simulated(path):
        Scheduler.current.step()
    _REAL["unlink"](path, **more)


def _listdir(path: Any = ".") -> list[str]:
    if _is_simulated(path):
        assert _disk is not None
        _disk.access(path)
        return _disk.listdir(path)
    return list(_REAL["listdir"](path))


def _fsync(fd: int) -> None:
    if _disk is None or Scheduler.current.process is None:
        _REAL["fsync"](fd)
    else:
        Scheduler.current.step()


@contextmanager
def simulated_files() -> Iterator[None]:
    """Send the file operations of simulated processes through the disk."""
    ours = {
        "open": _with_path("open", 0),
        "write": _to_file("write"),
        "pwrite": _to_file("pwrite"),
        "link": _with_path("link", 1, _after_link),
        "replace": _with_path("replace", 1),
        "mkdir": _with_path("mkdir", 0, SimDisk.created),
        "unlink": _unlink,
        "listdir": _listdir,
        "fsync": _fsync,
    }
    for name, function in ours.items():
        setattr(os, name, function)
    try:
        yield
    finally:
        for name, function in _REAL.items():
            setattr(os, name, function)
