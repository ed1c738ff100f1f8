"""Render a page that compares several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.rundir import RunDir
from hpctrain.telemetry.hparams import varying_hparams
from hpctrain.telemetry.report.html_renderer import LiveParts, chart, curve, render_page, time_breakdown_rows
from hpctrain.telemetry.report.run_data import RunData, format_setting
from hpctrain.telemetry.report.run_results import common_ranking, find_best, rank_key
from hpctrain.telemetry.report.summary import key_figures
from hpctrain.text import NOTHING

_MAX_METRICS = 12
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
    names = list(dict.fromkeys(name for run in runs for name in run.curves.names))
    return render_page(
        "comparison.html.j2",
        live=live,
        title=" · ".join(run.run_id for run in runs),
        charts=[
            chart(
                f"metric-{index}",
                name,
                [
                    curve(_label(run, varying), points, run.curves.not_finite(name))
                    for run in ordered[:_MAX_CURVES]
                    if (points := run.curves.points(name))
                ],
                height=180 if index else 320,
            )
            for index, name in enumerate(names[:_MAX_METRICS])
        ],
        num_runs=len(runs),
        curves_omitted=[run.run_id for run in ordered[_MAX_CURVES:]],
        figures=_rows([_figures(run, varying) for run in ordered]),
        breakdown=_rows(
            [
                {"run": run.run_id}
                | {row["name"]: row["share"] for row in time_breakdown_rows(run.breakdown)}
                for run in ordered
            ]
        ),
        differences=[["", *(run.run_id for run in ordered)], *spec_differences(ordered)],
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


def _figures(run: RunData, varying: Sequence[str]) -> dict[str, str]:
    hparams = {name: format_setting(run.hparams[name]) for name in varying if name in run.hparams}
    figures = {name: value for name, value, _ in key_figures(run)}
    return {"run": run.run_id, **hparams, "state": run.state, **figures}


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
    rows = map(list, zip(*_rows(columns), strict=True))
    return [row for row in rows if len(set(row[1:])) > 1]


def _rows(records: Sequence[dict[str, str]]) -> list[list[str]]:
    """Return a header with all names, and one row per record."""
    names = dict.fromkeys(name for record in records for name in record)
    return [[*names], *([record.get(name, NOTHING) for name in names] for record in records)]
