"""Finding and ending processes by what they are, never by a bare number that may be another's by now."""

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
class Process:
    """A living process as /proc shows it; a zombie is not one."""

    pid: int
    parent: int
    #: Clock ticks since boot. With the pid this names one process for ever.
    started: int
    argv: tuple[str, ...]
    #: What it was started with; empty where we may not look.
    environ: Mapping[str, str]

    def kill(self) -> None:
        """Send SIGKILL, to this very process or to none."""
        with suppress(ProcessLookupError, FileNotFoundError):
            fd = os.pidfd_open(self.pid)
            try:
                if _stat(self.pid)[2] == self.started:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            finally:
                os.close(fd)


def processes() -> list[Process]:
    """All living processes of this machine."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            # It may end at any moment while we look.
            with suppress(FileNotFoundError, ProcessLookupError):
                found.append(_read(int(entry)))
    return [process for process in found if process is not None]


def end_all(wanted: Callable[[Process], bool], what: str, limit_s: float = 10.0) -> None:
    """Kill the processes that are `wanted` and all their descendants, until none is left.

    Raises:
        SchedulerError: some are still there after `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    while victims := with_descendants(wanted, processes()):
        if time.monotonic() > deadline:
            pids = ", ".join(str(victim.pid) for victim in victims)
            raise SchedulerError(f"{what}: still there {limit_s:.0f} s after SIGKILL: process {pids}; see ps")
        for victim in victims:
            victim.kill()
        time.sleep(0.02)


def with_descendants(wanted: Callable[[Process], bool], among: Iterable[Process]) -> list[Process]:
    """The wanted processes of `among` and everything below them."""
    children: dict[int, list[Process]] = {}
    for process in among:
        children.setdefault(process.parent, []).append(process)
    chosen: dict[int, Process] = {}
    pending = [process for siblings in children.values() for process in siblings if wanted(process)]
    while pending:
        process = pending.pop()
        if process.pid not in chosen:
            chosen[process.pid] = process
            pending.extend(children.get(process.pid, ()))
    return list(chosen.values())


def _read(pid: int) -> Process | None:
    state, parent, started = _stat(pid)
    if state in "ZX":
        return None
    folder = Path("/proc") / str(pid)
    argv = _words(folder / "cmdline")
    pairs = (word.partition("=") for word in _words(folder / "environ"))
    return Process(pid, parent, started, tuple(argv), {key: value for key, _, value in pairs})


def _stat(pid: int) -> tuple[str, int, int]:
    """State, parent and start time of a process; see proc(5)."""
    # The second field is the command in parentheses, and may hold spaces and parentheses itself.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[19])


def _words(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode(errors="surrogateescape").removesuffix("\0").split("\0")
    except PermissionError:
        return []
