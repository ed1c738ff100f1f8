"""Table of runs with their hyper-parameters and metrics, for `list` and `sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cli.common import echo_table, one_line
from hpctrain.errors import UserError
from hpctrain.rundir import RunDir
from hpctrain.telemetry.hparams import varying_hparams
from hpctrain.telemetry.report.run_results import Mode, RunResults, common_ranking, read_results
from hpctrain.text import NOTHING, format_count, format_number, suggest

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus

#: A run, its hyper-parameters and its metrics.
ResultRow = tuple["RunStatus", RunResults]


def read_rows(
    statuses: Sequence[RunStatus], metric: str | None = None, mode: Mode | None = None
) -> list[ResultRow]:
    """Read the results of each run. All best values are those of the same metric. See `read_results`."""
    folders = [RunDir(Path(status.run_dir)) for status in statuses]
    found = [read_results(folder, metric, mode) for folder in folders]
    ranking = common_ranking(results.best for results in found)
    for place, (folder, results) in enumerate(zip(folders, found, strict=True)):
        if results.best and (results.best.metric, results.best.mode) != ranking:
            found[place] = read_results(folder, *ranking)
    return list(zip(statuses, found, strict=True))


def sort_rows(rows: Sequence[ResultRow], name: str, *, reverse: bool = False) -> list[ResultRow]:
    """Sort by a hyper-parameter, a metric, `step` or `state`; runs without a value are last.

    Raises:
        UserError: no run has such a value.
    """
    keyed = [(_value(row, name), row) for row in rows]
    known = [each for each in keyed if each[0] is not None]
    if rows and not known:
        names = dict.fromkeys(n for _, results in rows for n in (*results.hparams, *results.metrics))
        raise UserError(
            f"No run has a hyper-parameter or metric {name!r} (--sort). "
            f"{suggest(name, names, otherwise='Available: ' + ', '.join(names) + '.')}"
        )
    is_number = all(isinstance(value, int | float) for value, _ in known)
    known.sort(key=lambda each: each[0] if is_number else str(each[0]), reverse=reverse)
    return [row for _, row in known] + [row for value, row in keyed if value is None]


def _value(row: ResultRow, name: str) -> Any:
    status, results = row
    if name in ("step", "state"):
        return getattr(status, name)
    if results.best is not None and name == results.best.metric:
        return results.best.value
    return results.metrics.get(name, results.hparams.get(name))


def as_document(row: ResultRow) -> dict[str, Any]:
    """Return a row for `--json`."""
    return asdict(row[0]) | asdict(row[1])


def echo_rows(rows: Sequence[ResultRow], names: Sequence[str] = ()) -> None:
    """Print a line per run: state, step, the hyper-parameters that differ, and the best value of the metric.

    `names` are additional columns.
    """
    columns = list(dict.fromkeys([*varying_hparams([results.hparams for _, results in rows]), *names]))
    best = next((results.best for _, results in rows if results.best), None)
    titles = ["RUN", "STATE", "STEP", *columns]
    if best is not None:
        titles = [*(title for title in titles if title != best.metric), f"{best.metric} ({best.mode})", "AT"]
        columns = [name for name in columns if name != best.metric]
    lines = [titles]
    for row in rows:
        status, results = row
        cells = [status.run_id, str(status.state), format_count(status.step)]
        cells += [_text(_value(row, name)) for name in columns]
        if best is not None:
            own = results.best
            cells += [format_number(own.value), format_count(own.step)] if own else [NOTHING, NOTHING]
        lines.append(cells)
    echo_table([[one_line(cell) for cell in line] for line in lines])


def _text(value: object) -> str:
    if value is None:
        return NOTHING
    return format_number(value) if isinstance(value, float) else str(value)
