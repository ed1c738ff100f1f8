"""What the nodes measured of themselves, as one table over time: a row a GPU, a column a stretch of time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hpctrain.telemetry.marks import is_finite
from hpctrain.telemetry.report.lines import read_lines

COLUMNS = 240
#: Byte that stands for a stretch in which nothing was measured; the others are values from 0 to 1, times 254.
NOTHING = 255
#: A line with more is a damaged one.
_MOST_GPUS = 64

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
)


@dataclass
class HeatMap:
    """One quantity of all GPUs: means of each stretch of time."""

    quantity: Quantity
    most: float
    cells: bytes
    """A row a GPU, of `COLUMNS` bytes; see `NOTHING`."""
    means: list[float | None]
    """Of each GPU, over all its time."""


@dataclass
class Devices:
    """What the nodes measured."""

    rows: list[str] = field(default_factory=list)
    """Node and number of each GPU."""
    maps: list[HeatMap] = field(default_factory=list)


def read_devices(files: list[Path], start: float, end: float) -> Devices:
    """Read the files of all nodes.

    Args:
        files: `telemetry/node-000.jsonl` and so on.
        start: seconds since the epoch that the first column begins with.
        end: the same, of the end of the last.
    """
    rows: list[str] = []
    tables: dict[str, list[_Row]] = {each.field: [] for each in QUANTITIES}
    for file in files:
        host, columns = _read(file, start, (end - start) / COLUMNS or 1.0)
        known = {name: _rows(lists) for name, lists in columns.items()}
        count = max(map(len, known.values()))
        rows += [f"{host} · GPU {number}" for number in range(count)]
        for name, table in tables.items():
            table += known[name] + [[(0.0, 0)] * COLUMNS] * (count - len(known[name]))
    measured = [each for each in QUANTITIES if any(n for row in tables[each.field] for _, n in row)]
    return Devices(rows, [_heat_map(each, tables[each.field]) for each in measured])


def _read(file: Path, start: float, width: float) -> tuple[str, dict[str, list[list[list[object]]]]]:
    """The node's name, and of each quantity what its lines say in each column: values of all GPUs."""
    host = file.stem
    lines: list[list[dict[str, Any]]] = [[] for _ in range(COLUMNS + 1)]
    for line in read_lines(file):
        if is_finite(time := line.get("time")) and 0 <= (column := int((time - start) / width)) <= COLUMNS:
            lines[column].append(line)
            host = line.get("host") or host
    # What lies at the very end is of the last column.
    lines[-2] += lines.pop()
    return str(host), {
        name: [
            [
                values
                for line in column
                if type(values := line.get(name)) is list and len(values) <= _MOST_GPUS
            ]
            for column in lines
        ]
        for name in (each.field for each in QUANTITIES)
    }


def _rows(columns: list[list[list[object]]]) -> list[_Row]:
    """Of each GPU, the sum and the number of its values in each column."""
    cells = [[_sum(values) for values in zip_longest(*lines)] for lines in columns]
    return [list(row) for row in zip_longest(*cells, fillvalue=(0.0, 0))]


def _sum(values: tuple[object, ...]) -> tuple[float, int]:
    if set(map(type, values)) <= {int, float}:
        total = sum(values)  # type: ignore[arg-type]
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
