"""Read measurements of nodes and GPUs as tables: one row per GPU or node, one column per time interval."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hpctrain.telemetry.report.jsonl import read_jsonl
from hpctrain.text import format_share, is_finite, pluralize

COLUMNS = 240
#: Byte for an interval without measurements; other bytes are values from 0 to 1, times 254.
_NO_VALUE = 255
#: Maximum number of GPUs, and maximum time span, of a valid line.
_MAX_GPUS, _MAX_LINE_S = 64, 3600.0
#: GPU utilisation in per cent above which a GPU is busy.
_BUSY = 50.0

#: Sum and number of a GPU's values, per column.
_Row = list[tuple[float, int]]
#: The lines of each column.
_Columns = list[list[dict[str, Any]]]


@dataclass(frozen=True)
class Quantity:
    """A quantity that is measured per GPU or node."""

    field: str
    """Field name in the telemetry lines."""
    name: str
    unit: str
    most: float | None = None
    """The value drawn darkest; None selects the highest measured value."""
    scale: float = 1.0
    """Factor for values in the file."""


QUANTITIES = (
    Quantity("gpu_util", "utilization", "%", 100.0),
    Quantity("gpu_sm", "busy multiprocessors", "%", 100.0),
    Quantity("gpu_tensor", "tensor cores", "%", 100.0),
    Quantity("gpu_dram", "memory bandwidth", "%", 100.0),
    Quantity("gpu_memory", "memory", "GiB", scale=2**-30),
    Quantity("gpu_power_w", "power", "W"),
    Quantity("gpu_temp_c", "temperature", "°C"),
    Quantity("gpu_clock_mhz", "clock", "MHz"),
)
NODE_QUANTITIES = (
    Quantity("cpu", "CPUs", "%", 100.0),
    Quantity("memory", "memory", "GiB", scale=2**-30),
    Quantity("disk_read", "disk read", "MB/s", scale=1e-6),
    Quantity("disk_write", "disk written", "MB/s", scale=1e-6),
    Quantity("net_rx", "network received", "MB/s", scale=1e-6),
    Quantity("net_tx", "network sent", "MB/s", scale=1e-6),
)


@dataclass
class HeatMap:
    """One quantity of all GPUs or nodes: means per time interval."""

    quantity: Quantity
    most: float
    cells: bytes
    """One row of `COLUMNS` bytes per GPU; see `_NO_VALUE`."""
    means: list[float | None]
    """Mean of each GPU over the complete time."""


@dataclass
class NodeSeries:
    """A measured node."""

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
        """Return a description of each problem of the hardware."""
        return [
            *(f"Xid {xid}" for xid in self.xids),
            *([pluralize(self.ecc_errors, "memory error")] if self.ecc_errors else []),
            *(
                f"clock lowered by {reason} for {format_share(part)} of the time"
                for reason, part in self.throttled.items()
            ),
        ]


@dataclass
class DeviceMetrics:
    """Measurements of all nodes."""

    rows: list[str] = field(default_factory=list)
    """Host and index of each GPU."""
    maps: list[HeatMap] = field(default_factory=list)
    nodes: list[NodeSeries] = field(default_factory=list)
    node_maps: list[HeatMap] = field(default_factory=list)
    energy_j: list[float] = field(default_factory=list)
    """Energy per column; empty if not measured."""

    def mean(self, name: str) -> float | None:
        """Return the mean of a quantity over all GPUs or nodes, in its unit; None if not measured."""
        for heat_map in (*self.maps, *self.node_maps):
            means = [mean for mean in heat_map.means if mean is not None]
            if heat_map.quantity.field == name and means:
                return sum(means) / len(means)
        return None


def read_device_metrics(files: list[Path], start: float, end: float) -> DeviceMetrics:
    """Read the files of all nodes from `start` to `end`. A file may contain several hosts."""
    by_host: dict[str, _Columns] = {}
    energy_j: list[float] = []
    for file in files:
        _read(file, start, (end - start) / COLUMNS or 1.0, by_host, energy_j)
    rows: list[str] = []
    tables: dict[str, list[_Row]] = defaultdict(list)
    for host, columns in by_host.items():
        gpu_rows = {quantity.field: _gpu_rows(columns, quantity.field) for quantity in QUANTITIES}
        num_gpus = max(map(len, gpu_rows.values()))
        rows += [f"{host} · GPU {number}" for number in range(num_gpus)]
        for name, lists in gpu_rows.items():
            tables[name] += lists + [[(0.0, 0)] * COLUMNS] * (num_gpus - len(lists))
        for quantity in NODE_QUANTITIES:
            name = quantity.field
            tables[name].append([_sum([line[name] for line in lines if name in line]) for lines in columns])
    maps, node_maps = (
        [
            _heat_map(quantity, tables[quantity.field])
            for quantity in quantities
            if any(count for row in tables[quantity.field] for _, count in row)
        ]
        for quantities in (QUANTITIES, NODE_QUANTITIES)
    )
    nodes = [_node(host, columns) for host, columns in by_host.items()]
    return DeviceMetrics(rows, maps, nodes, node_maps, energy_j)


def _read(
    file: Path, start: float, width: float, by_host: dict[str, _Columns], energy_j: list[float]
) -> None:
    """Group the lines of a file by host and by the columns that they cover, and add up their energy."""
    for line in read_jsonl(file):
        if (
            not is_finite(time := line.get("time"))
            or not 0 <= (position := (time - start) / width) < COLUMNS + 1
        ):
            continue
        host = str(line.get("host") or file.stem)
        if (columns := by_host.get(host)) is None:
            columns = by_host[host] = [[] for _ in range(COLUMNS)]
        # A line at the exact end belongs to the last column.
        first = last = min(int(position), COLUMNS - 1)
        if is_finite(seconds := line.get("seconds")) and width < seconds < _MAX_LINE_S:
            first = min(last, max(0, int((time - seconds - start) / width)))
        for column in range(first, last + 1):
            columns[column].append(line)
        if "energy_j" in line or "gpu_energy_j" in line:
            total_j = sum(_finite([line.get("energy_j"), *_list(line.get("gpu_energy_j"))]))
            energy_j.extend([0.0] * (COLUMNS - len(energy_j)))
            for column in range(first, last + 1):
                energy_j[column] += total_j / (last + 1 - first)


def _node(host: str, columns: _Columns) -> NodeSeries:
    """Return the hardware of a node and a summary of its problems."""
    node = NodeSeries(host)
    reasons: defaultdict[str, float] = defaultdict(float)
    clocks = num_clocks = num_measured = 0.0
    for line, weight in ((line, 1 / len(column)) for column in columns for line in column):
        if "cpus" in line:
            node.cpus = _highest([line["cpus"]])
            node.memory_bytes = _highest([line.get("memory_total")])
            node.gpu_names = [str(name) for name in _list(line.get("gpu_names"))]
            node.gpu_memory_bytes = _highest(_list(line.get("gpu_memory_total")))
            continue
        num_measured += weight
        if "gpu_throttled" in line:
            for reason in {str(reason) for gpu in _list(line["gpu_throttled"]) for reason in _list(gpu)}:
                reasons[reason] += weight
        if "gpu_xids" in line:
            node.xids += [xid for gpu in _list(line["gpu_xids"]) for xid in _list(gpu) if type(xid) is int]
        if "gpu_ecc_errors" in line:
            node.ecc_errors = max(node.ecc_errors, int(sum(_finite(_list(line["gpu_ecc_errors"])))))
        if "memory" in line:
            node.highest_memory = _highest([node.highest_memory, line["memory"]])
        if "gpu_memory" in line:
            node.highest_gpu_memory = _highest([node.highest_gpu_memory, *_list(line["gpu_memory"])])
        if "gpu_clock_mhz" in line:
            pairs = zip(_list(line["gpu_clock_mhz"]), _list(line.get("gpu_util")), strict=False)
            busy = [clock for clock, util in pairs if is_finite(clock) and is_finite(util) and util > _BUSY]
            clocks, num_clocks = clocks + weight * sum(busy), num_clocks + weight * len(busy)
    node.xids = sorted(set(node.xids))
    node.throttled = {
        reason: weight / num_measured for reason, weight in sorted(reasons.items(), key=lambda pair: -pair[1])
    }
    node.clock_mhz = clocks / num_clocks if num_clocks else None
    return node


def _finite(values: Sequence[object]) -> list[float]:
    return [value for value in values if is_finite(value)]


def _highest(values: Sequence[object]) -> int | None:
    return max(map(int, _finite(values)), default=None)


def _list(value: object) -> list[Any]:
    return value[:_MAX_GPUS] if isinstance(value, list) else []


def _gpu_rows(columns: _Columns, name: str) -> list[_Row]:
    """Return the sum and number of values per column, for each GPU."""
    cells = []
    for lines in columns:
        values = [gpus for line in lines if type(gpus := line.get(name)) is list and len(gpus) <= _MAX_GPUS]
        cells.append([_sum(gpu) for gpu in zip_longest(*values)])
    return [list(row) for row in zip_longest(*cells, fillvalue=(0.0, 0))]


def _sum(values: Sequence[object]) -> tuple[float, int]:
    """Return the sum and number of the numeric values; the fast path assumes that all are numeric."""
    try:
        total: object = sum(values)  # type: ignore[arg-type]
    except TypeError:
        total = None
    if is_finite(total):
        return float(total), len(values)
    numbers = [float(value) for value in _finite(values)]
    return (total, len(numbers)) if is_finite(total := sum(numbers)) else (0.0, 0)


def _heat_map(quantity: Quantity, table: list[_Row]) -> HeatMap:
    cells = [total * quantity.scale / count if count else None for row in table for total, count in row]
    most = quantity.most or max((cell for cell in cells if cell is not None), default=0.0) or 1.0
    coded = bytes(_NO_VALUE if cell is None else round(254 * max(0, min(1, cell / most))) for cell in cells)
    means: list[float | None] = []
    for row in table:
        # Lines cover different times, but columns cover the same.
        known = [total / count for total, count in row if count]
        means.append(statistics.fmean(known) * quantity.scale if known else None)
    return HeatMap(quantity, most, coded, means)
