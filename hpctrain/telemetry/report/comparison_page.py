"""Render a page that compares several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.rundir import RunDir
from hpctrain.telemetry.hparams import varying_hparams
from hpctrain.telemetry.report.html_renderer import LiveParts, render_page
from hpctrain.telemetry.report.run_data import RunData, format_setting
from hpctrain.telemetry.report.run_page import curve_data, time_breakdown_rows
from hpctrain.telemetry.report.run_results import common_ranking, find_best, rank_key
from hpctrain.telemetry.report.summary import key_figures
from hpctrain.text import NOTHING, format_count, format_duration, format_number

_MAX_POINTS, _MAX_METRICS = 2000, 12
#: Limited by the number of colors of the page.
_MAX_CURVES = 8
#: Fields of a specification that are unique to each run.
_UNIQUE_FIELDS = frozenset({"run_id", "run_dir", "code"})


def render_comparison(runs: Sequence[RunData], *, live: LiveParts | None = None) -> str:
    """Return a page that compares several runs: figures, overlaid curves and time breakdowns.

    See `render_page`.
    """
    varying = varying_hparams([run.hparams for run in runs])
    ordered = _best_first(runs) if varying else list(runs)
    names = dict.fromkeys(name for run in runs for name in run.curves.names)
    ledgers = [
        (run.run_id, format_duration(run.breakdown.wall_us / 1e6), time_breakdown_rows(run.breakdown))
        for run in runs
        if run.breakdown.wall_us
    ]
    return render_page(
        "comparison.html.j2",
        live=live,
        title=" · ".join(run.run_id for run in runs),
        charts=[
            {
                "id": f"metric-{index}",
                "title": name,
                "axis": "step",
                "height": 180 if index else 320,
                "series": [
                    curve_data(_label(run, varying), points, _MAX_POINTS, run.curves.not_finite(name))
                    for run in ordered[:_MAX_CURVES]
                    if (points := run.curves.points(name))
                ],
                "join": True,
            }
            for index, name in enumerate(list(names)[:_MAX_METRICS])
        ],
        heats=[],
        runs=runs,
        curves_omitted=[run.run_id for run in ordered[_MAX_CURVES:]],
        figures=_figure_rows(runs, varying),
        trials=_trial_rows(ordered, varying) if varying else None,
        ledgers=ledgers,
        differences=spec_differences(runs),
    )


def _label(run: RunData, varying: Sequence[str]) -> str:
    hparams = " ".join(f"{name}={run.hparams[name]}" for name in varying if name in run.hparams)
    return f"{Path(run.folder).name}: {hparams}" if hparams else run.run_id


def _best_first(runs: Sequence[RunData]) -> list[RunData]:
    """Sort runs by the best values of their common metric."""
    ranking = common_ranking(run.best for run in runs)
    if ranking[0] is None:
        return list(runs)
    ranked = [
        run
        if run.best and (run.best.metric, run.best.mode) == ranking
        else replace(
            run, best=find_best(RunDir(Path(run.folder)).checkpoints, run.curves, run.environment, *ranking)
        )
        for run in runs
    ]
    return sorted(ranked, key=lambda run: rank_key(run.best))


def _trial_rows(ordered: Sequence[RunData], varying: Sequence[str]) -> list[list[str]]:
    """Return a header, and the varying hyper-parameters and the best value of each run."""
    best = ordered[0].best
    metric = f"{best.metric} (best)" if best is not None else "best"
    rows = [["run", "state", *varying, metric, "at step"]]
    for run in ordered:
        hparams = [format_setting(run.hparams[name]) if name in run.hparams else NOTHING for name in varying]
        value = [format_number(run.best.value), format_count(run.best.step)] if run.best else [NOTHING] * 2
        rows.append([run.run_id, run.state, *hparams, *value])
    return rows


def _figure_rows(runs: Sequence[RunData], varying: Sequence[str]) -> list[list[str]]:
    return _table(
        [
            {
                **{name: format_setting(run.hparams[name]) for name in varying if name in run.hparams},
                "State": run.state,
                **{name: value for name, value, _ in key_figures(run)},
            }
            for run in runs
        ]
    )


def spec_differences(runs: Sequence[RunData]) -> list[list[str]]:
    """Return the configuration differences: the name of a field, and the value in each run."""
    columns = []
    for run in runs:
        column = {
            name: format_setting(value) for name, value in run.spec.items() if name not in _UNIQUE_FIELDS
        }
        if run.codes:
            changed = " with uncommitted changes" if run.codes[-1].changed else ""
            column["commit"] = f"{run.codes[-1].commit}{changed}"
        columns.append(column)
    return [row for row in _table(columns) if len(set(row[1:])) > 1]


def _table(columns: Sequence[dict[str, str]]) -> list[list[str]]:
    """Return one row per name: the name, and its value in each column."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, NOTHING) for column in columns)] for name in names]
