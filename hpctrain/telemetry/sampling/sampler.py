"""Measure a node in a process separate from the ranks.

    python -m hpctrain.telemetry.sampling.sampler RUN NODE

writes `telemetry/node-NNN.jsonl` of the run until its standard input closes or receives a line. The process
therefore exits with its parent in all cases. Signals that request a save are ignored.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from hpctrain.cluster.addresses import host_name
from hpctrain.cluster.visible_gpus import visible_devices
from hpctrain.files import append_json_line, make_folder, write_atomic
from hpctrain.rundir import RunDir
from hpctrain.telemetry.sampling.nvml import GpuReader, GpuReading

#: Complete disks only: with partitions and virtual devices, bytes would be counted twice.
_WHOLE_DISK = re.compile(r"(sd|vd|xvd|hd)[a-z]+|nvme\d+n\d+|mmcblk\d+")
#: Sectors are always 512 bytes in procfs, regardless of the disk (Linux, Documentation/admin-guide/iostats).
_SECTOR_BYTES = 512


class ProcfsReader:
    def __init__(self, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._clock = proc, clock
        self._time, self._before = clock(), self._counters()

    @property
    def memory_bytes(self) -> int | None:
        return self._memory().get("MemTotal")

    def read(self) -> dict[str, float]:
        """Return the measurements since the previous call, as far as known; rates are bytes per second.

        `cpu` is the utilization of all CPUs in per cent, `memory` the bytes unavailable to other programs.
        """
        time_now, counters = self._clock(), self._counters()
        seconds, before = time_now - self._time, self._before
        self._time, self._before = time_now, counters
        # The sum decreases when a device is removed.
        rates = {
            name: max(0, count - before[name]) / seconds
            for name, count in counters.items()
            if name in before and seconds > 0
        }
        busy, idle = rates.pop("busy", 0.0), rates.pop("idle", 0.0)
        memory, readings = self._memory(), dict[str, float]()
        if busy + idle:
            readings["cpu"] = 100 * (busy / (busy + idle))
        if "MemTotal" in memory and "MemAvailable" in memory:
            readings["memory"] = memory["MemTotal"] - memory["MemAvailable"]
        return readings | rates

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


#: Seconds between two readings.
READ_INTERVAL_S = 1.0
#: Seconds per line: short at first, when the user may be watching, longer after ten minutes.
FIRST_LINE_INTERVAL_S, LATER_LINE_INTERVAL_S, FIRST_LINES_DURATION_S = 5.0, 30.0, 600.0

#: Aggregation of the readings of a line; for other fields, the last value is used.
_MEAN_FIELDS = frozenset({"util", "power_w", "clock_mhz", "sm", "tensor", "dram"})
_MAX_FIELDS = frozenset({"memory", "temp_c"})
#: All distinct values of the interval.
_UNION_FIELDS = frozenset({"throttled", "xids"})
#: A counter since the driver was loaded, which becomes the amount during the line.
_ENERGY = "energy_j"
#: Escapes in the value of a label of Prometheus.
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class TelemetrySampler:
    def __init__(
        self,
        path: Path,
        gpus: GpuReader,
        node: ProcfsReader,
        *,
        host: str,
        run_id: str,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Start measuring, with open readers. `path` is the output file."""
        self._path, self._gpus, self._node, self._host = path, gpus, node, host
        self._run_id, self._prometheus = run_id, path.with_suffix(".prom")
        self._clock, self._now = clock, now
        self._started = self._line_began = clock()
        self._readings: list[list[GpuReading]] = []
        self._counted: list[GpuReading] = []

    def begin(self) -> None:
        make_folder(self._path.parent)
        self._write(
            {
                "gpu_names": self._gpus.names,
                "gpu_memory_total": self._gpus.memory_bytes,
                "cpus": os.cpu_count() or 1,
                "memory_total": self._node.memory_bytes,
            }
        )
        self._counted = self._gpus.read()

    def read(self) -> None:
        self._readings.append(self._gpus.read())
        is_early = self._clock() - self._started < FIRST_LINES_DURATION_S
        interval_s = FIRST_LINE_INTERVAL_S if is_early else LATER_LINE_INTERVAL_S
        if self._clock() - self._line_began >= interval_s:
            self.flush()

    def flush(self) -> None:
        if not self._readings:
            return
        seconds = self._clock() - self._line_began
        line: dict[str, Any] = {"seconds": round(seconds, 3)}
        if any(self._readings):
            line |= _summarize(self._readings, self._counted)
        line |= {
            name: round(value, 1) if isinstance(value, float) else value
            for name, value in self._node.read().items()
        }
        self._write(line)
        self._counted, self._readings, self._line_began = self._readings[-1], [], self._clock()

    def _write(self, line: Mapping[str, Any]) -> None:
        record = {"time": self._now(), "host": self._host, **line}
        append_json_line(self._path, record)
        text = format_prometheus(self._run_id, record)
        write_atomic(self._prometheus, text, durable=False)

    def close(self) -> None:
        """Remove the file for Prometheus, which would report old values."""
        self._prometheus.unlink(missing_ok=True)


def _summarize(
    readings: Sequence[Sequence[GpuReading]], before: Sequence[GpuReading]
) -> dict[str, list[Any]]:
    """Return a list with one value per GPU for each field that at least one GPU reports."""
    line: dict[str, list[Any]] = {}
    readings_of_gpus = list(zip(*readings, strict=False))
    for name in (field.name for field in fields(GpuReading)):
        values = []
        for index, gpu_readings in enumerate(readings_of_gpus):
            reported = [value for reading in gpu_readings if (value := getattr(reading, name)) is not None]
            earlier = getattr(before[index], name) if index < len(before) else None
            values.append(_combine(name, reported, earlier))
        if any(value not in (None, []) for value in values):
            line[f"gpu_{name}"] = values
    return line


def _combine(name: str, values: Sequence[Any], earlier: Any) -> Any:
    """Return one value for the readings of a line. `earlier` is the value before the line."""
    if name in _UNION_FIELDS:
        return sorted({item for items in values for item in items})
    if not values or (name == _ENERGY and earlier is None):
        return None
    if name == _ENERGY:
        return round(max(0.0, values[-1] - earlier), 1)
    if name in _MEAN_FIELDS:
        return round(sum(values) / len(values), 1)
    return max(values) if name in _MAX_FIELDS else values[-1]


def format_prometheus(run_id: str, line: Mapping[str, Any]) -> str:
    """Return gauges of all numbers in a line, for node_exporter ("Exposition formats", version 0.0.4)."""
    common = {"run": run_id, "host": str(line["host"])}
    samples: list[str] = []
    for name, value in line.items():
        if isinstance(value, list):
            labelled = [({**common, "gpu": str(gpu)}, number) for gpu, number in enumerate(value)]
        else:
            labelled = [(common, value)] if name not in ("time", "seconds") else []
        gauges = []
        for labels, number in labelled:
            if isinstance(number, int | float):
                text = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
                gauges.append(f"hpctrain_{name}{{{text}}} {number}")
        if gauges:
            samples += [f"# TYPE hpctrain_{name} gauge", *gauges]
    return "\n".join([*samples, ""])


def _claim_node(claim: socket.socket, run: RunDir, node: int) -> bool:
    """Return false while another process measures this node, such as that of another step."""
    name = hashlib.sha256(str(run.telemetry(node)).encode()).hexdigest()
    try:
        claim.bind(f"\0hpctrain-{name}")  # an abstract address (unix(7)), which is free after any exit
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Measure this node until standard input closes or receives a line."""
    run, node = RunDir(Path(argv[-2])), int(argv[-1])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    claim = socket.socket(socket.AF_UNIX)
    while not _claim_node(claim, run, node):
        if select.select([sys.stdin], [], [], READ_INTERVAL_S)[0]:
            return 0
    with claim, GpuReader(visible_devices(environ)) as gpus:
        sampler = TelemetrySampler(
            run.telemetry(node), gpus, ProcfsReader(), host=host_name(environ), run_id=run.run_id
        )
        try:
            sampler.begin()
            while not select.select([sys.stdin], [], [], READ_INTERVAL_S)[0]:
                sampler.read()
            sampler.read()
            sampler.flush()
            sampler.close()
        except OSError as error:
            # The training must not depend on the measurements.
            print(f"hpctrain: node measurements have stopped: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
