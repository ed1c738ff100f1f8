"""Processes of this user on this host, held by a pidfd so that a signal reaches the inspected process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessHandle:
    """A process held by a pidfd, so that its pid cannot be reused unnoticed."""

    pid: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    """The environment at its start."""
    _handle: int

    @property
    def parent(self) -> int:
        """The pid of its parent process; 0 if the process has ended."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return 0
        # The second field is the command in parentheses, and may contain anything.
        return int(stat.rpartition(")")[2].split()[1])

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; True if the process was still running."""
        try:
            signal.pidfd_send_signal(self._handle, number)
        except OSError:
            return False
        return True


def iter_user_processes() -> Iterator[ProcessHandle]:
    """Yield all but this process, each held until the next is requested; none if there is no /proc."""
    try:
        numbers = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except FileNotFoundError:
        return
    for pid in numbers:
        if pid == os.getpid():
            continue
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            # Read after the pidfd was opened. The process may end at any moment.
            with suppress(OSError):
                folder = Path(f"/proc/{pid}")
                if folder.stat().st_uid == os.geteuid():
                    pairs = (word.partition("=") for word in _words(folder / "environ"))
                    environ = {name: value for name, _, value in pairs}
                    yield ProcessHandle(pid, tuple(_words(folder / "cmdline")), environ, handle)
        finally:
            os.close(handle)


def _words(path: Path) -> list[str]:
    return os.fsdecode(path.read_bytes()).removesuffix("\0").split("\0")
