"""List, signal and tie together processes of this host, identified by pid and start time."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.rundir import LIFELINE_VARIABLE

#: prctl(2): the signal that the kernel sends when the parent dies.
_PR_SET_PDEATHSIG = 1
#: Index of the end of the command line in `stat_fields`.
_ARG_END = 46


@contextmanager
def block_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals for this thread, and for processes started within the block until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class ProcessInfo:
    """A live process as shown by /proc, not a zombie."""

    pid: int
    parent: int
    #: Clock ticks since boot; with the pid this identifies a process uniquely.
    started: int
    argv: tuple[str, ...]
    #: Initial environment; empty without permission.
    environ: Mapping[str, str]

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to this process only; return true if it was still running."""
        with suppress(OSError):
            fd = _pidfd_open(self.pid)
            try:
                if _stat(self.pid)[2] == self.started:
                    os.kill(self.pid, number) if fd is None else signal.pidfd_send_signal(fd, number)
                    return True
            finally:
                if fd is not None:
                    os.close(fd)
        return False

    def kill(self) -> None:
        self.signal(signal.SIGKILL)


def _pidfd_open(pid: int) -> int | None:
    """Return a descriptor of a process; None if Python was built for an old glibc, or the kernel is old."""
    try:
        return os.pidfd_open(pid)
    except AttributeError:
        return None
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return None
        raise


def processes(uid: int | None = None) -> list[ProcessInfo]:
    """Return the live processes of this host or of a user; empty without /proc."""
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    return [*filter(None, (_read(int(name), uid) for name in names if name.isdecimal()))]


def _read(pid: int, uid: int | None) -> ProcessInfo | None:
    folder = Path("/proc") / str(pid)
    # The process may exit at any moment.
    with suppress(FileNotFoundError, ProcessLookupError):
        if uid is not None and folder.stat().st_uid != uid:
            return None
        state, parent, started = _stat(pid)
        pairs = (entry.partition("=") for entry in _strings(folder / "environ"))
        environ = {key: value for key, _, value in pairs}
        if state not in "ZX":
            return ProcessInfo(pid, parent, started, tuple(_strings(folder / "cmdline")), environ)
    return None


def title_writer(argument: str) -> Callable[[str], None]:
    """Return a function that writes a title for `ps` over this last argument of the process."""
    replaced = os.fsencode(argument)
    try:
        address = int(stat_fields("self")[_ARG_END]) - len(replaced) - 1
        is_last = Path("/proc/self/cmdline").read_bytes().endswith(b"\0" + replaced + b"\0")
    except (OSError, IndexError):
        is_last = False

    def write(title: str) -> None:
        if is_last:
            ctypes.memmove(address, title.encode()[: len(replaced)].ljust(len(replaced)), len(replaced))

    return write


def child_pids(pid: int) -> list[int]:
    """Return the children of a process; empty if it has exited."""
    children: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            # Threads may end at any moment.
            with suppress(OSError):
                children += map(int, (thread / "children").read_text().split())
    return children


def stat_fields(pid: int | str) -> list[str]:
    """Return the fields of a process, or of a thread `PID/task/TID`, from the state on; see proc(5)."""
    # The field before is the command in parentheses, which may itself contain spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _stat(pid: int) -> tuple[str, int, int]:
    fields = stat_fields(pid)
    return fields[0], int(fields[1]), int(fields[19])


def _strings(path: Path) -> list[str]:
    try:
        return os.fsdecode(path.read_bytes()).removesuffix("\0").split("\0")
    except PermissionError:
        return []


def die_with_supervisor(environ: MutableMapping[str, str]) -> None:
    """Kill this process group when the other end of an inherited lifeline closes."""
    text = environ.pop(LIFELINE_VARIABLE, None)
    if text is None:
        return
    fd = int(text)
    os.set_inheritable(fd, False)

    def watch() -> None:
        os.read(fd, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="hpctrain-lifeline", daemon=True).start()


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Request a signal from the kernel when the parent dies. Does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
