"""Show the hyper-parameters and metrics of the trials of a sweep in a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cli.common import echo_table, one_line
from hpctrain.rundir import RunDir
from hpctrain.telemetry.hparams import varying_hparams
from hpctrain.telemetry.report.run_results import Mode, RunResults, common_ranking, read_results
from hpctrain.text import format_count, format_number

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus

#: A run, its hyper-parameters and its metrics.
ResultRow = tuple["RunStatus", RunResults]


def read_rows(
    statuses: Sequence[RunStatus], metric: str | None = None, mode: Mode | None = None
) -> list[ResultRow]:
    """Read the results of each run. All best values are those of the same metric. See `read_results`."""
    rows = [(status, read_results(RunDir(Path(status.run_dir)), metric, mode)) for status in statuses]
    ranking = common_ranking(results.best for _, results in rows)
    for index, (status, results) in enumerate(rows):
        if results.best and (results.best.metric, results.best.mode) != ranking:
            rows[index] = (status, read_results(RunDir(Path(status.run_dir)), *ranking))
    return rows


def as_document(row: ResultRow) -> dict[str, Any]:
    return asdict(row[0]) | asdict(row[1])


def echo_rows(rows: Sequence[ResultRow], names: Sequence[str] = ()) -> None:
    """Print a line per run: state, step, the hyper-parameters that differ, and the best value of the metric.

    `names` are additional hyper-parameters.
    """
    columns = list(dict.fromkeys([*varying_hparams([results.hparams for _, results in rows]), *names]))
    best = next((results.best for _, results in rows if results.best), None)
    lines = [["RUN", "STATE", "STEP", *columns, *([f"{best.metric} ({best.mode})", "AT"] if best else [])]]
    for status, results in rows:
        values = (results.hparams.get(name) for name in columns)
        hparams = [format_number(v) if isinstance(v, float | None) else str(v) for v in values]
        cells = [status.run_id, str(status.state), format_count(status.step), *hparams]
        if best is not None:
            value, step = (results.best.value, results.best.step) if results.best else (None, None)
            cells += [format_number(value), format_count(step)]
        lines.append(cells)
    echo_table([[one_line(cell) for cell in line] for line in lines])
