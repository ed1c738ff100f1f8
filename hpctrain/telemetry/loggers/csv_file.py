"""Metrics as a table: a row a logged step, a column a metric."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.files import end_torn_line, write_atomic
from hpctrain.telemetry.loggers.protocol import Ending, Line, LoggedRun

_FIRST = ("step", "epoch", "time", "attempt")


@dataclass
class Csv:
    """Writes `metrics.csv` in the run folder, or another file."""

    path: str | None = None
    name: str = "csv"
    _columns: list[str] = field(default_factory=list, repr=False)

    def start(self, run: LoggedRun) -> None:
        self._file = Path(self.path) if self.path else run.folder / "metrics.csv"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        end_torn_line(self._file)
        rows = self._read()
        self._columns = list(rows[0]) if rows else []

    def log(self, lines: Sequence[Line]) -> None:
        new = dict.fromkeys(name for line in lines for name in line.values)
        columns = [*(self._columns or _FIRST)]
        columns += [name for name in new if name not in columns]
        rows: list[Mapping[str, object]] = [
            {"step": line.step, "epoch": line.epoch, "time": line.time, "attempt": line.attempt}
            | {name: value for name, value in line.values.items() if name not in _FIRST}
            for line in lines
        ]
        if columns == self._columns:
            with open(self._file, "a", newline="", encoding="utf-8") as file:
                file.write(_text(columns, rows))
            return
        # A metric that comes later, as those of validation do, makes the table wider.
        self._write(columns, [*self._read(), *rows])

    def rewind(self, step: int) -> bool:
        if self._columns:
            self._write(self._columns, [row for row in self._read() if _step(row) <= step])
        return True

    def finish(self, ending: Ending) -> None:
        """Every line has been written as it came."""

    def _read(self) -> list[dict[str, str]]:
        try:
            with open(self._file, newline="", encoding="utf-8", errors="replace") as file:
                return [row for row in csv.DictReader(file, restval="") if None not in row]
        except FileNotFoundError:
            return []

    def _write(self, columns: list[str], rows: Iterable[Mapping[str, object]]) -> None:
        write_atomic(self._file, _text(columns, rows, header=True), durable=False)
        self._columns = columns


def _text(columns: list[str], rows: Iterable[Mapping[str, object]], *, header: bool = False) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    if header:
        table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _step(row: dict[str, str]) -> float:
    try:
        return float(row.get("step", ""))
    except ValueError:
        return float("inf")  # a line that was cut
