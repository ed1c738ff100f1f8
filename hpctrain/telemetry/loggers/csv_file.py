"""Write metrics to a CSV table: one row per logged step, one column per metric."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.files import make_folder, own_file, terminate_partial_line, write_atomic
from hpctrain.telemetry.loggers.logger import LoggedRun, MetricRecord, TrainingEnd

_FIRST = ("step", "epoch", "time", "attempt")


@dataclass
class Csv:
    """Logger that writes `metrics.csv` in the run folder, or another file.

    With `folder`, it writes this file into a subfolder with the name of the run.
    """

    path: str | None = None
    name: str = "csv"
    folder: str | None = None
    _columns: list[str] = field(default_factory=list, repr=False)

    def start(self, run: LoggedRun) -> None:
        folder = Path(self.folder) / run.run_id if self.folder else run.folder
        self._file = Path(self.path) if self.path else folder / "metrics.csv"
        make_folder(self._file.parent)
        terminate_partial_line(self._file)
        rows = self._read()
        self._columns = list(rows[0]) if rows else []

    def log(self, lines: Sequence[MetricRecord]) -> None:
        new = dict.fromkeys(name for line in lines for name in line.values)
        columns = [*(self._columns or _FIRST)]
        columns += [name for name in new if name not in columns]
        rows: list[Mapping[str, object]] = [
            {"step": line.step, "epoch": line.epoch, "time": line.time, "attempt": line.attempt}
            | {name: value for name, value in line.values.items() if name not in _FIRST}
            for line in lines
        ]
        if columns == self._columns:
            with open(self._file, "a", newline="", encoding="utf-8", opener=own_file) as file:
                file.write(_text(columns, rows))
            return
        # A metric that first appears later, e.g. in validation, adds a column.
        self._write(columns, [*self._read(), *rows])

    def rewind(self, step: int) -> bool:
        if self._columns:
            self._write(self._columns, [row for row in self._read() if _step(row) <= step])
        return True

    def finish(self, ending: TrainingEnd) -> None:
        """Do nothing: every line is already written."""

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
        return float("inf")  # a truncated line
