"""What the nodes measured of themselves, as tables over time: a row a GPU or a node, a column a stretch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from hpctrain.telemetry.marks import is_finite
from hpctrain.telemetry.report.lines import read_lines

COLUMNS = 240
#: Byte that stands for a stretch in which nothing was measured; the others are values from 0 to 1, times 254.
NOTHING = 255
#: A line with more is a damaged one.
_MOST_GPUS = 64

#: A line that says to sum up more is a damaged one.
_LONGEST_LINE_S = 3600.0
#: Per cent of utilisation above which a GPU works.
_BUSY = 50.0

#: Sum and number of the values of a GPU, in each column.
_Row = list[tuple[float, int]]


@dataclass(frozen=True)
class Quantity:
    """Something that is measured of each GPU."""

    field: str
    """In the lines of a node."""
    name: str
    unit: str
    most: float | None = None
    """The value that is drawn darkest; None takes the highest that was measured."""
    scale: float = 1.0
    """What a value of the file is multiplied with."""


QUANTITIES = (
    Quantity("gpu_util", "utilisation", "%", 100.0),
    Quantity("gpu_memory", "memory", "GiB", scale=2**-30),
    Quantity("gpu_power_w", "power", "W"),
    Quantity("gpu_temp_c", "temperature", "°C"),
    Quantity("gpu_clock_mhz", "clock", "MHz"),
)


NODE_QUANTITIES = (
    Quantity("cpu", "processors", "%", 100.0),
    Quantity("memory", "memory", "GiB", scale=2**-30),
    Quantity("disk_read", "disk read", "MB/s", scale=1e-6),
    Quantity("disk_write", "disk written", "MB/s", scale=1e-6),
    Quantity("net_rx", "network received", "MB/s", scale=1e-6),
    Quantity("net_tx", "network sent", "MB/s", scale=1e-6),
)


@dataclass
class HeatMap:
    """One quantity of all GPUs, or of all nodes: means of each stretch of time."""

    quantity: Quantity
    most: float
    cells: bytes
    """A row a GPU, of `COLUMNS` bytes; see `NOTHING`."""
    means: list[float | None]
    """Of each GPU, over all its time."""


@dataclass
class Node:
    """A node that was measured."""

    host: str
    cpus: int | None = None
    memory_bytes: int | None = None
    gpu_names: list[str] = field(default_factory=list)
    gpu_memory_bytes: int | None = None
    """Of each of its GPUs."""
    highest_gpu_memory: int | None = None
    throttled: dict[str, float] = field(default_factory=dict)
    """Why clocks were lowered, and in which share of the time."""
    clock_mhz: float | None = None
    """The mean of its GPUs while they worked."""
    ecc_errors: int = 0
    xids: list[int] = field(default_factory=list)


@dataclass
class Devices:
    """What the nodes measured."""

    rows: list[str] = field(default_factory=list)
    """Node and number of each GPU."""
    maps: list[HeatMap] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    node_maps: list[HeatMap] = field(default_factory=list)
    """The same of each node."""

    def mean(self, name: str) -> float | None:
        """The mean of a quantity over all GPUs or nodes, in its unit; None where nothing tells it."""
        for each in (*self.maps, *self.node_maps):
            known = [mean for mean in each.means if mean is not None]
            if each.quantity.field == name and known:
                return sum(known) / len(known)
        return None


#: Of each column, the lines that lie in it.
_Columns = list[list[dict[str, Any]]]


def read_devices(files: list[Path], start: float, end: float) -> Devices:
    """Read the files of all nodes.

    Args:
        files: `telemetry/node-000.jsonl` and so on; a run that moved has several nodes in one.
        start: seconds since the epoch that the first column begins with.
        end: the same, of the end of the last.
    """
    by_host: dict[str, _Columns] = {}
    for file in files:
        _read(file, start, (end - start) / COLUMNS or 1.0, by_host)
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
    return Devices(rows, maps, [_node(host, columns) for host, columns in by_host.items()], node_maps)


def _read(file: Path, start: float, width: float, by_host: dict[str, _Columns]) -> None:
    """Sort the lines of a file by their node, and by the columns that what they sum up lies in."""
    for line in read_lines(file):
        if is_finite(time := line.get("time")) and 0 <= (column := int((time - start) / width)) <= COLUMNS:
            host = str(line.get("host") or file.stem)
            if (columns := by_host.get(host)) is None:
                columns = by_host[host] = [[] for _ in range(COLUMNS)]
            # What lies at the very end is of the last column.
            last = min(column, COLUMNS - 1)
            columns[last].append(line)
            if is_finite(seconds := line.get("seconds")) and width < seconds < _LONGEST_LINE_S:
                for earlier in range(max(0, int((time - seconds - start) / width)), last):
                    columns[earlier].append(line)


def _lists(columns: _Columns, name: str) -> list[list[list[object]]]:
    """What the lines of each column say of all GPUs."""
    return [
        [values for line in column if type(values := line.get(name)) is list and len(values) <= _MOST_GPUS]
        for column in columns
    ]


def _numbers(column: list[dict[str, Any]], name: str) -> list[object]:
    return [line[name] for line in column if name in line]


def _is_measured(table: list[_Row]) -> bool:
    return any(count for row in table for _, count in row)


def _node(host: str, columns: _Columns) -> Node:
    """What is told of a node once, and what went wrong on it."""
    node = Node(host)
    lines = 0
    reasons: Counter[str] = Counter()
    clocks, count, highest = 0.0, 0, 0
    for line in chain.from_iterable(columns):
        if "cpus" in line:
            node.cpus, node.memory_bytes = _whole(line["cpus"]), _whole(line.get("memory_total"))
            names = line.get("gpu_names")
            node.gpu_names = [str(name) for name in names] if isinstance(names, list) else []
            node.gpu_memory_bytes = max(_wholes(line, "gpu_memory_total"), default=None)
            continue
        lines += 1
        if "gpu_throttled" in line:
            reasons.update({str(one) for several in _listed(line, "gpu_throttled") for one in _list(several)})
        if "gpu_xids" in line:
            node.xids += [xid for several in _listed(line, "gpu_xids") for xid in _list(several)]
        if "gpu_ecc_errors" in line:
            node.ecc_errors = max([node.ecc_errors, sum(_wholes(line, "gpu_ecc_errors"))])
        if "gpu_memory" in line:
            highest = max(highest, _highest(line["gpu_memory"]))
        if "gpu_clock_mhz" in line:
            pairs = zip(_listed(line, "gpu_clock_mhz"), _listed(line, "gpu_util"), strict=False)
            busy = [clock for clock, util in pairs if is_finite(clock) and is_finite(util) and util > _BUSY]
            clocks, count = clocks + sum(busy), count + len(busy)
    node.xids = sorted({xid for xid in node.xids if isinstance(xid, int)})
    node.throttled = {reason: number / lines for reason, number in reasons.most_common()} if lines else {}
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
    return _list(line.get(name))[:_MOST_GPUS]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _rows(columns: list[list[list[object]]]) -> list[_Row]:
    """Of each GPU, the sum and the number of its values in each column."""
    cells = [[_sum(values) for values in zip_longest(*lines)] for lines in columns]
    return [list(row) for row in zip_longest(*cells, fillvalue=(0.0, 0))]


def _sum(values: Sequence[object]) -> tuple[float, int]:
    """Sum and number of those that are numbers; nearly always all are, and that is tried first."""
    try:
        total: object = sum(values)  # type: ignore[arg-type]
    except TypeError:
        total = None
    if is_finite(total):
        return float(total), len(values)
    known = [float(value) for value in values if is_finite(value)]
    return sum(known), len(known)


def _heat_map(quantity: Quantity, table: list[_Row]) -> HeatMap:
    cells = [total * quantity.scale / count if count else None for row in table for total, count in row]
    most = quantity.most or max((cell for cell in cells if cell is not None), default=0.0) or 1.0
    coded = bytes(NOTHING if cell is None else max(0, min(254, round(254 * cell / most))) for cell in cells)
    means: list[float | None] = []
    for row in table:
        count = sum(number for _, number in row)
        means.append(sum(total for total, _ in row) * quantity.scale / count if count else None)
    return HeatMap(quantity, most, coded, means)
