"""Processes of this user on this host, each held while it is looked at: what was seen gets the signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Held:
    """A process whose number cannot become another's."""

    pid: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    """What it was started with."""
    _handle: int

    @property
    def parent(self) -> int:
        """The process that started it, or that has inherited it; 0 where it has ended."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return 0
        # The second field is the command in parentheses, and may hold anything.
        return int(stat.rpartition(")")[2].split()[1])

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal, and tell whether it was still there to get it."""
        try:
            signal.pidfd_send_signal(self._handle, number)
        except OSError:
            return False
        return True


def own_processes() -> Iterator[Held]:
    """All but this one, each held until the next is asked for; none where there is no /proc to ask."""
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
            # Read after the handle was taken. It may end at any moment.
            with suppress(OSError):
                folder = Path(f"/proc/{pid}")
                if folder.stat().st_uid == os.geteuid():
                    pairs = (word.partition("=") for word in _words(folder / "environ"))
                    environ = {name: value for name, _, value in pairs}
                    yield Held(pid, tuple(_words(folder / "cmdline")), environ, handle)
        finally:
            os.close(handle)


def _words(path: Path) -> list[str]:
    return os.fsdecode(path.read_bytes()).removesuffix("\0").split("\0")
