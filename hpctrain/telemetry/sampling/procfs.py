"""Measure CPU, memory, disks and network of a node, from /proc."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: Complete disks only: with partitions and virtual devices, bytes would be counted twice.
_WHOLE_DISK = re.compile(r"(sd|vd|xvd|hd)[a-z]+|nvme\d+n\d+|mmcblk\d+")
#: Sectors are always 512 bytes in procfs, regardless of the disk (Linux, Documentation/admin-guide/iostats).
_SECTOR_BYTES = 512


@dataclass(frozen=True)
class NodeReading:
    """Measurements of a node since the previous reading; None if unknown."""

    cpu: float | None = None
    """Utilisation of all CPUs together, in per cent."""
    memory: int | None = None
    """Bytes unavailable to other programs."""
    disk_read: float | None = None
    """Bytes per second, over all disks."""
    disk_write: float | None = None
    net_rx: float | None = None
    """Bytes per second over the network, without loopback."""
    net_tx: float | None = None


class ProcfsReader:
    def __init__(self, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._clock = proc, clock
        self._time, self._before = clock(), self._counters()

    @property
    def num_cpus(self) -> int:
        return os.cpu_count() or 1

    @property
    def memory_bytes(self) -> int | None:
        return self._memory().get("MemTotal")

    def read(self) -> NodeReading:
        time_now, counters = self._clock(), self._counters()
        seconds, before = time_now - self._time, self._before
        self._time, self._before = time_now, counters

        def rate(name: str) -> float | None:
            if seconds <= 0 or name not in counters or name not in before:
                return None
            # The sum decreases when a device is removed.
            return max(0, counters[name] - before[name]) / seconds

        busy, idle = rate("busy"), rate("idle")
        memory = self._memory()
        total, available = memory.get("MemTotal"), memory.get("MemAvailable")
        return NodeReading(
            cpu=None if busy is None or idle is None or not busy + idle else 100 * (busy / (busy + idle)),
            memory=None if total is None or available is None else total - available,
            disk_read=rate("disk_read"),
            disk_write=rate("disk_write"),
            net_rx=rate("net_rx"),
            net_tx=rate("net_tx"),
        )

    def _counters(self) -> dict[str, int]:
        counters: dict[str, int] = {}
        with suppress(OSError, ValueError, IndexError):
            ticks = list(map(int, self._text("stat").split("\n", 1)[0].split()[1:9]))
            # User, nice, system, idle, iowait, irq, softirq, steal (proc(5)).
            counters["idle"] = ticks[3] + ticks[4]
            counters["busy"] = sum(ticks) - counters["idle"]
        with suppress(OSError, ValueError, IndexError):
            rows = [line.split() for line in self._text("diskstats").splitlines()]
            disks = [row for row in rows if _WHOLE_DISK.fullmatch(row[2])]
            counters["disk_read"] = sum(int(row[5]) for row in disks) * _SECTOR_BYTES
            counters["disk_write"] = sum(int(row[9]) for row in disks) * _SECTOR_BYTES
        with suppress(OSError, ValueError, IndexError):
            lines = [line.split(":", 1) for line in self._text("net/dev").splitlines()[2:]]
            cards = [numbers.split() for name, numbers in lines if name.strip() != "lo"]
            counters["net_rx"] = sum(int(numbers[0]) for numbers in cards)
            counters["net_tx"] = sum(int(numbers[8]) for numbers in cards)
        return counters

    def _memory(self) -> dict[str, int]:
        """Return the fields of meminfo in bytes; the file uses KiB (proc(5))."""
        with suppress(OSError, ValueError, IndexError):
            lines = [line.split() for line in self._text("meminfo").splitlines()]
            return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
        return {}

    def _text(self, name: str) -> str:
        return (self._proc / name).read_text()
