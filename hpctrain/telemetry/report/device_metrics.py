"""Average the measurements of nodes and GPUs over a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

from hpctrain.record_types import NodeSample
from hpctrain.telemetry.report.run_results import read_report_records
from hpctrain.text import format_share, pluralize

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
_Samples = dict[int, list[NodeSample]]
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
    hosts: defaultdict[str, _Samples] = defaultdict(lambda: defaultdict(list))
    for file in files:
        for sample in read_report_records(file, NodeSample):
            begin = sample.time - sample.seconds
            if sample.time < start or begin > end:
                continue
            hosts[sample.host or file.stem][max(1, round(sample.seconds))].append(sample)
            if joules := _sum(sample.gpu_energy_j or ())[0]:
                devices.energy.append((begin, sample.time, joules))
    for host, samples in hosts.items():
        gpu_means = _means(samples, GPU_QUANTITIES)
        devices.nodes.append(_node(host, samples))
        devices.node_means += _means(samples, NODE_QUANTITIES)[:1] or [{}]
        devices.gpus += [f"{host} · GPU {index}" for index in range(len(gpu_means))]
        devices.gpu_means += gpu_means
    for rows in (devices.node_means, devices.gpu_means):
        measured = dict.fromkeys(name for row in rows for name in row)
        rows[:] = [{name: row.get(name) for name in measured} for row in rows]
    return devices


def _means(samples: _Samples, quantities: Mapping[str, tuple[str, float]]) -> list[Means]:
    """Return the means over time of each GPU, or in one row those of the node."""
    rows: list[Means] = []
    for name, (_, scale) in quantities.items():
        sums: list[tuple[float, float]] = []
        for seconds, group in samples.items():
            values = [value for sample in group if (value := getattr(sample, name)) is not None]
            gpus = zip_longest(*(value if isinstance(value, list) else [value] for value in values))
            sums = [
                (total + seconds * group_total, count + seconds * group_count)
                for (total, count), (group_total, group_count) in zip_longest(
                    sums, map(_sum, gpus), fillvalue=(0.0, 0)
                )
            ]
        rows += [{} for _ in range(len(sums) - len(rows))]
        for row, (total, count) in zip(rows, sums, strict=False):
            if count:
                row[name] = total / count * scale
    return rows


def _node(host: str, samples: _Samples) -> NodeSeries:
    node = NodeSeries(host)
    reasons: defaultdict[str, float] = defaultdict(float)
    clocks = num_clocks = measured_s = 0.0
    xids: set[int] = set()
    for sample, seconds in ((sample, seconds) for seconds, group in samples.items() for sample in group):
        if sample.cpus is not None:
            node.cpus, node.memory_bytes, node.gpu_names = sample.cpus, sample.memory_total, sample.gpu_names
            node.gpu_memory_bytes = _highest(sample.gpu_memory_total)
            continue
        measured_s += seconds
        for reason in set(chain.from_iterable(sample.gpu_throttled)):
            reasons[reason] += seconds
        xids.update(*sample.gpu_xids)
        node.ecc_errors = max(node.ecc_errors, int(_sum(sample.gpu_ecc_errors or ())[0]))
        node.highest_memory = _highest([node.highest_memory, sample.memory])
        node.highest_gpu_memory = _highest([node.highest_gpu_memory, *(sample.gpu_memory or ())])
        pairs = zip(sample.gpu_clock_mhz or (), sample.gpu_util or (), strict=False)
        busy = [clock for clock, util in pairs if clock is not None and util is not None and util > _BUSY]
        clocks, num_clocks = clocks + seconds * sum(busy), num_clocks + seconds * len(busy)
    node.xids = sorted(xids)
    by_duration = sorted(reasons.items(), key=lambda pair: -pair[1])
    node.throttled = {reason: seconds / measured_s for reason, seconds in by_duration}
    node.clock_mhz = clocks / num_clocks if num_clocks else None
    return node


def _highest(values: Iterable[float | None]) -> int | None:
    return max((int(value) for value in values if value is not None), default=None)


def _sum(values: Sequence[float | None]) -> tuple[float, int]:
    """Return the sum and number of the known values; the fast path assumes that all are known."""
    try:
        return float(sum(values)), len(values)  # type: ignore[arg-type]
    except TypeError:
        numbers = [value for value in values if value is not None]
        return float(sum(numbers)), len(numbers)
