"""Average the measurements of nodes and GPUs over a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hpctrain.telemetry.report.artifacts import read_jsonl
from hpctrain.text import format_share, is_finite, pluralize

#: Maximum number of GPUs, and maximum time span, of a valid line.
_MAX_GPUS, _MAX_LINE_S = 64, 3600.0
#: GPU utilisation in per cent above which a GPU is busy.
_BUSY = 50.0

#: Measurements of each GPU: field of a telemetry line, title, and factor for its unit.
GPU_QUANTITIES = {
    "gpu_util": ("utilization, %", 1.0),
    "gpu_sm": ("busy multiprocessors, %", 1.0),
    "gpu_tensor": ("tensor cores, %", 1.0),
    "gpu_dram": ("memory bandwidth, %", 1.0),
    "gpu_memory": ("memory, GiB", 2**-30),
    "gpu_power_w": ("power, W", 1.0),
    "gpu_temp_c": ("temperature, °C", 1.0),
    "gpu_clock_mhz": ("clock, MHz", 1.0),
}
NODE_QUANTITIES = {
    "cpu": ("CPUs, %", 1.0),
    "memory": ("memory, GiB", 2**-30),
    "disk_read": ("disk read, MB/s", 1e-6),
    "disk_write": ("disk written, MB/s", 1e-6),
    "net_rx": ("network received, MB/s", 1e-6),
    "net_tx": ("network sent, MB/s", 1e-6),
}

#: The lines of a node by the seconds that each covers, rounded.
_Lines = dict[int, list[dict[str, Any]]]
#: Mean of each quantity in its unit; None if not measured.
Means = dict[str, float | None]


@dataclass
class NodeSeries:
    host: str
    cpus: int | None = None
    memory_bytes: int | None = None
    gpu_names: list[str] = field(default_factory=list)
    gpu_memory_bytes: int | None = None
    """Memory per GPU, in bytes."""
    highest_gpu_memory: int | None = None
    highest_memory: int | None = None
    """Highest memory in use on the node, in bytes, also by other jobs."""
    throttled: dict[str, float] = field(default_factory=dict)
    """Fraction of the time per reason for a lowered clock."""
    clock_mhz: float | None = None
    """Mean clock of its GPUs while busy."""
    ecc_errors: int = 0
    xids: list[int] = field(default_factory=list)

    def problems(self) -> list[str]:
        return [
            *(f"Xid {xid}" for xid in self.xids),
            *([pluralize(self.ecc_errors, "memory error")] if self.ecc_errors else []),
            *(
                f"clock lowered by {reason} for {format_share(share)} of the time"
                for reason, share in self.throttled.items()
            ),
        ]


@dataclass
class DeviceMetrics:
    nodes: list[NodeSeries] = field(default_factory=list)
    node_means: list[Means] = field(default_factory=list)
    """The measured quantities of each node."""
    gpus: list[str] = field(default_factory=list)
    """Host and index of each GPU."""
    gpu_means: list[Means] = field(default_factory=list)
    energy: list[tuple[float, float, float]] = field(default_factory=list)
    """Begin, end and joules of each measurement."""

    def mean(self, name: str) -> float | None:
        """Return the mean of a quantity over all GPUs or nodes, in its unit; None if not measured."""
        rows = self.gpu_means if name in GPU_QUANTITIES else self.node_means
        means = [mean for row in rows if (mean := row.get(name)) is not None]
        return sum(means) / len(means) if means else None


def read_device_metrics(files: Iterable[Path], start: float, end: float) -> DeviceMetrics:
    """Read the files of all nodes from `start` to `end`. A file may contain several hosts."""
    devices = DeviceMetrics()
    hosts: defaultdict[str, _Lines] = defaultdict(lambda: defaultdict(list))
    for file in files:
        for line in read_jsonl(file):
            time, seconds = line.get("time"), line.get("seconds")
            seconds = seconds if is_finite(seconds) and 0 < seconds < _MAX_LINE_S else 1.0
            if not is_finite(time) or time < start or time - seconds > end:
                continue
            hosts[str(line.get("host") or file.stem)][max(1, round(seconds))].append(line)
            joules, _ = _sum(_list(line.get("gpu_energy_j")))
            if joules:
                devices.energy.append((time - seconds, time, joules))
    for host, lines in hosts.items():
        gpu_means = _means(lines, GPU_QUANTITIES)
        devices.nodes.append(_node(host, lines))
        devices.node_means += _means(lines, NODE_QUANTITIES)[:1] or [{}]
        devices.gpus += [f"{host} · GPU {index}" for index in range(len(gpu_means))]
        devices.gpu_means += gpu_means
    for rows in (devices.node_means, devices.gpu_means):
        measured = dict.fromkeys(name for row in rows for name in row)
        rows[:] = [{name: row.get(name) for name in measured} for row in rows]
    return devices


def _means(lines: _Lines, quantities: Iterable[str]) -> list[Means]:
    """Return the means over time of each GPU, or in one row those of the node."""
    rows: list[Means] = []
    for name in quantities:
        sums: list[tuple[float, float]] = []
        for seconds, group in lines.items():
            values = [
                value if type(value) is list else [value]
                for line in group
                if (value := line.get(name)) is not None
            ]
            gpus = zip_longest(*(value for value in values if len(value) <= _MAX_GPUS))
            sums = [
                (total + seconds * group_total, count + seconds * group_count)
                for (total, count), (group_total, group_count) in zip_longest(
                    sums, map(_sum, gpus), fillvalue=(0.0, 0)
                )
            ]
        rows += [{} for _ in range(len(sums) - len(rows))]
        scale = (GPU_QUANTITIES | NODE_QUANTITIES)[name][1]
        for row, (total, count) in zip(rows, sums, strict=False):
            if count:
                row[name] = total / count * scale
    return rows


def _node(host: str, lines: _Lines) -> NodeSeries:
    node = NodeSeries(host)
    reasons: defaultdict[str, float] = defaultdict(float)
    clocks = num_clocks = measured_s = 0.0
    for line, seconds in ((line, seconds) for seconds, group in lines.items() for line in group):
        if "cpus" in line:
            node.cpus = _highest([line["cpus"]])
            node.memory_bytes = _highest([line.get("memory_total")])
            node.gpu_names = [str(name) for name in _list(line.get("gpu_names"))]
            node.gpu_memory_bytes = _highest(_list(line.get("gpu_memory_total")))
            continue
        measured_s += seconds
        if "gpu_throttled" in line:
            for reason in {str(reason) for gpu in _list(line["gpu_throttled"]) for reason in _list(gpu)}:
                reasons[reason] += seconds
        if "gpu_xids" in line:
            node.xids += [xid for gpu in _list(line["gpu_xids"]) for xid in _list(gpu) if type(xid) is int]
        if "gpu_ecc_errors" in line:
            node.ecc_errors = max(node.ecc_errors, int(_sum(_list(line["gpu_ecc_errors"]))[0]))
        if "memory" in line:
            node.highest_memory = _highest([node.highest_memory, line["memory"]])
        if "gpu_memory" in line:
            node.highest_gpu_memory = _highest([node.highest_gpu_memory, *_list(line["gpu_memory"])])
        if "gpu_clock_mhz" in line:
            pairs = zip(_list(line["gpu_clock_mhz"]), _list(line.get("gpu_util")), strict=False)
            busy = [clock for clock, util in pairs if is_finite(clock) and is_finite(util) and util > _BUSY]
            clocks, num_clocks = clocks + seconds * _sum(busy)[0], num_clocks + seconds * len(busy)
    node.xids = sorted(set(node.xids))
    by_duration = sorted(reasons.items(), key=lambda pair: -pair[1])
    node.throttled = {reason: seconds / measured_s for reason, seconds in by_duration}
    node.clock_mhz = clocks / num_clocks if num_clocks else None
    return node


def _finite(values: Sequence[object]) -> list[float]:
    return [value for value in values if is_finite(value)]


def _highest(values: Sequence[object]) -> int | None:
    return max(map(int, _finite(values)), default=None)


def _list(value: object) -> list[Any]:
    return value[:_MAX_GPUS] if isinstance(value, list) else []


def _sum(values: Sequence[object]) -> tuple[float, int]:
    """Return the sum and number of the numeric values; the fast path assumes that all are numeric."""
    try:
        total: object = sum(values)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        total = None
    if is_finite(total):
        return float(total), len(values)
    numbers = [float(value) for value in _finite(values)]
    return (total, len(numbers)) if is_finite(total := sum(numbers)) else (0.0, 0)
