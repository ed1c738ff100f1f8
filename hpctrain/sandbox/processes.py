"""Finding and killing processes by their identity, never by a bare pid that may be reused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import SchedulerError


@dataclass(frozen=True)
class ProcessInfo:
    """A live process as shown by /proc, not a zombie."""

    pid: int
    parent: int
    #: Clock ticks since boot; with the pid this identifies a process uniquely.
    started: int
    argv: tuple[str, ...]
    #: Its initial environment; empty if we lack permission.
    environ: Mapping[str, str]

    def kill(self) -> None:
        """Send SIGKILL to exactly this process."""
        with suppress(ProcessLookupError, FileNotFoundError):
            fd = os.pidfd_open(self.pid)
            try:
                if _stat(self.pid)[2] == self.started:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            finally:
                os.close(fd)


def processes() -> list[ProcessInfo]:
    """Return all live processes of this machine."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            # The process may exit at any moment.
            with suppress(FileNotFoundError, ProcessLookupError):
                found.append(_read(int(entry)))
    return [process for process in found if process is not None]


def kill_all(wanted: Callable[[ProcessInfo], bool], what: str, limit_s: float = 10.0) -> None:
    """Kill the processes that are `wanted` and all their descendants, until none is left.

    Raises:
        SchedulerError: some still exist after `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    while victims := with_descendants(wanted, processes()):
        if time.monotonic() > deadline:
            pids = ", ".join(str(victim.pid) for victim in victims)
            raise SchedulerError(
                f"{what}: process {pids} still running {limit_s:.0f} s after SIGKILL; inspect it with ps"
            )
        for victim in victims:
            victim.kill()
        time.sleep(0.02)


def with_descendants(
    wanted: Callable[[ProcessInfo], bool], among: Iterable[ProcessInfo]
) -> list[ProcessInfo]:
    """Return the wanted processes of `among` and all their descendants."""
    children: dict[int, list[ProcessInfo]] = {}
    for process in among:
        children.setdefault(process.parent, []).append(process)
    chosen: dict[int, ProcessInfo] = {}
    pending = [process for siblings in children.values() for process in siblings if wanted(process)]
    while pending:
        process = pending.pop()
        if process.pid not in chosen:
            chosen[process.pid] = process
            pending.extend(children.get(process.pid, ()))
    return list(chosen.values())


def _read(pid: int) -> ProcessInfo | None:
    state, parent, started = _stat(pid)
    if state in "ZX":
        return None
    folder = Path("/proc") / str(pid)
    argv = _words(folder / "cmdline")
    pairs = (word.partition("=") for word in _words(folder / "environ"))
    return ProcessInfo(pid, parent, started, tuple(argv), {key: value for key, _, value in pairs})


def _stat(pid: int) -> tuple[str, int, int]:
    """Return state, parent and start time of a process; see proc(5)."""
    # The second field is the command in parentheses, which may itself contain spaces and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[19])


def _words(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode(errors="surrogateescape").removesuffix("\0").split("\0")
    except PermissionError:
        return []
