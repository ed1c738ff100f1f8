"""Node and GPU measurements as tables: one row per GPU or node, one column per time interval."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hpctrain.telemetry.report.jsonl import read_jsonl
from hpctrain.text import is_finite

COLUMNS = 240
#: Byte for an interval without measurements; other bytes are values from 0 to 1, times 254.
NO_VALUE = 255
#: Maximum number of GPUs in a valid line.
_MAX_GPUS = 64

#: Maximum time span of a valid line.
_MAX_LINE_S = 3600.0
#: GPU utilisation in per cent above which a GPU is busy.
_BUSY = 50.0

#: Sum and number of a GPU's values, per column.
_Row = list[tuple[float, int]]


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
    """One row of `COLUMNS` bytes per GPU; see `NO_VALUE`."""
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


@dataclass
class DeviceMetrics:
    """Measurements of all nodes."""

    rows: list[str] = field(default_factory=list)
    """Host and index of each GPU."""
    maps: list[HeatMap] = field(default_factory=list)
    nodes: list[NodeSeries] = field(default_factory=list)
    node_maps: list[HeatMap] = field(default_factory=list)
    """The maps of the nodes."""
    energy_j: list[float] = field(default_factory=list)
    """Energy per column; empty if not measured."""

    def mean(self, name: str) -> float | None:
        """Return the mean of a quantity over all GPUs or nodes, in its unit; None if not measured."""
        for each in (*self.maps, *self.node_maps):
            known = [mean for mean in each.means if mean is not None]
            if each.quantity.field == name and known:
                return sum(known) / len(known)
        return None


#: The lines of each column.
_Columns = list[list[dict[str, Any]]]


def read_device_metrics(files: list[Path], start: float, end: float) -> DeviceMetrics:
    """Read the files of all nodes.

    Args:
        files: `telemetry/node-000.jsonl` etc.; if the run changed nodes, a file contains several hosts.
        start: start of the first column, in seconds since the epoch.
        end: end of the last column, in seconds since the epoch.
    """
    by_host: dict[str, _Columns] = {}
    energy_j: list[float] = []
    for file in files:
        _read(file, start, (end - start) / COLUMNS or 1.0, by_host, energy_j)
    rows: list[str] = []
    tables: dict[str, list[_Row]] = {each.field: [] for each in (*QUANTITIES, *NODE_QUANTITIES)}
    for host, columns in by_host.items():
        known = {each.field: _rows(_lists(columns, each.field)) for each in QUANTITIES}
        count = max(map(len, known.values()))
        rows += [f"{host} · GPU {number}" for number in range(count)]
        for name, lists in known.items():
            tables[name] += lists + [[(0.0, 0)] * COLUMNS] * (count - len(lists))
        for each in NODE_QUANTITIES:
            tables[each.field].append([_sum(_numbers(column, each.field)) for column in columns])
    maps, node_maps = (
        [_heat_map(each, tables[each.field]) for each in kinds if _is_measured(tables[each.field])]
        for kinds in (QUANTITIES, NODE_QUANTITIES)
    )
    nodes = [_node(host, columns) for host, columns in by_host.items()]
    return DeviceMetrics(rows, maps, nodes, node_maps, energy_j)


def _read(
    file: Path, start: float, width: float, by_host: dict[str, _Columns], energy_j: list[float]
) -> None:
    """Group the lines of a file by host and by the columns that they cover, and add up their energy."""
    for line in read_jsonl(file):
        if is_finite(time := line.get("time")) and 0 <= (position := (time - start) / width) < COLUMNS + 1:
            host = str(line.get("host") or file.stem)
            if (columns := by_host.get(host)) is None:
                columns = by_host[host] = [[] for _ in range(COLUMNS)]
            # A line at the exact end belongs to the last column.
            last = min(int(position), COLUMNS - 1)
            columns[last].append(line)
            first = last
            if is_finite(seconds := line.get("seconds")) and width < seconds < _MAX_LINE_S:
                first = min(last, max(0, int((time - seconds - start) / width)))
                for earlier in range(first, last):
                    columns[earlier].append(line)
            if "energy_j" in line or "gpu_energy_j" in line:
                used = (line.get("energy_j"), *_listed(line, "gpu_energy_j"))
                energy_j.extend([0.0] * (COLUMNS - len(energy_j)))
                for column in range(first, last + 1):
                    energy_j[column] += sum(each for each in used if is_finite(each)) / (last + 1 - first)


def _lists(columns: _Columns, name: str) -> list[list[list[object]]]:
    """Return the per-GPU lists of a field, for the lines of each column."""
    return [
        [values for line in column if type(values := line.get(name)) is list and len(values) <= _MAX_GPUS]
        for column in columns
    ]


def _numbers(column: list[dict[str, Any]], name: str) -> list[object]:
    return [line[name] for line in column if name in line]


def _is_measured(table: list[_Row]) -> bool:
    return any(count for row in table for _, count in row)


def _node(host: str, columns: _Columns) -> NodeSeries:
    """Return the hardware of a node and a summary of its problems."""
    node = NodeSeries(host)
    reasons: defaultdict[str, float] = defaultdict(float)
    clocks = count = num_measured = 0.0
    highest = 0
    for line, weight in ((line, 1 / len(column)) for column in columns for line in column):
        if "cpus" in line:
            node.cpus, node.memory_bytes = _whole(line["cpus"]), _whole(line.get("memory_total"))
            names = line.get("gpu_names")
            node.gpu_names = [str(name) for name in names] if isinstance(names, list) else []
            node.gpu_memory_bytes = max(_wholes(line, "gpu_memory_total"), default=None)
            continue
        num_measured += weight
        if "gpu_throttled" in line:
            for reason in {str(one) for several in _listed(line, "gpu_throttled") for one in _list(several)}:
                reasons[reason] += weight
        if "gpu_xids" in line:
            node.xids += [xid for several in _listed(line, "gpu_xids") for xid in _list(several)]
        if "gpu_ecc_errors" in line:
            node.ecc_errors = max([node.ecc_errors, sum(_wholes(line, "gpu_ecc_errors"))])
        if is_finite(memory := line.get("memory")):
            node.highest_memory = max(node.highest_memory or 0, int(memory))
        if "gpu_memory" in line:
            highest = max(highest, _highest(line["gpu_memory"]))
        if "gpu_clock_mhz" in line:
            pairs = zip(_listed(line, "gpu_clock_mhz"), _listed(line, "gpu_util"), strict=False)
            busy = [clock for clock, util in pairs if is_finite(clock) and is_finite(util) and util > _BUSY]
            clocks, count = clocks + weight * sum(busy), count + weight * len(busy)
    node.xids = sorted({xid for xid in node.xids if isinstance(xid, int)})
    node.throttled = {
        reason: part / num_measured for reason, part in sorted(reasons.items(), key=lambda one: -one[1])
    }
    node.highest_gpu_memory = highest or None
    node.clock_mhz = clocks / count if count else None
    return node


def _highest(values: object) -> int:
    try:
        most: object = max(values)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        most = max((value for value in _list(values) if is_finite(value)), default=0)
    return int(most) if is_finite(most) else 0


def _whole(value: object) -> int | None:
    return int(value) if is_finite(value) else None


def _wholes(line: dict[str, Any], name: str) -> list[int]:
    return [int(value) for value in _listed(line, name) if is_finite(value)]


def _listed(line: dict[str, Any], name: str) -> list[Any]:
    return _list(line.get(name))[:_MAX_GPUS]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _rows(columns: list[list[list[object]]]) -> list[_Row]:
    """Return the sum and number of values per column, for each GPU."""
    cells = [[_sum(values) for values in zip_longest(*lines)] for lines in columns]
    return [list(row) for row in zip_longest(*cells, fillvalue=(0.0, 0))]


def _sum(values: Sequence[object]) -> tuple[float, int]:
    """Return the sum and number of the numeric values; the fast path assumes that all are numeric."""
    try:
        total: object = sum(values)  # type: ignore[arg-type]
    except TypeError:
        total = None
    if is_finite(total):
        return float(total), len(values)
    known = [float(value) for value in values if is_finite(value)]
    return (total, len(known)) if is_finite(total := sum(known)) else (0.0, 0)


def _heat_map(quantity: Quantity, table: list[_Row]) -> HeatMap:
    cells = [total * quantity.scale / count if count else None for row in table for total, count in row]
    most = quantity.most or max((cell for cell in cells if cell is not None), default=0.0) or 1.0
    coded = bytes(NO_VALUE if cell is None else round(254 * max(0, min(1, cell / most))) for cell in cells)
    means: list[float | None] = []
    for row in table:
        # Lines cover different times, but columns cover the same.
        known = [total / count for total, count in row if count]
        means.append(statistics.fmean(known) * quantity.scale if known else None)
    return HeatMap(quantity, most, coded, means)
