"""Page that compares several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.telemetry.hparams import varying_hparams
from hpctrain.telemetry.report.html_renderer import LiveParts, render_page
from hpctrain.telemetry.report.metric_curves import MetricCurves
from hpctrain.telemetry.report.run_data import RunData
from hpctrain.telemetry.report.run_page import curve_data, time_breakdown_rows
from hpctrain.telemetry.report.summary import comparison_rows, spec_differences
from hpctrain.telemetry.report.trial_table import best_first, make_trial_table
from hpctrain.text import format_duration

_MAX_POINTS = 2000
_MAX_METRICS = 12
#: Limited by the number of colors of the page.
_MAX_CURVES = 8


def render_comparison(runs: Sequence[RunData], *, live: LiveParts | None = None) -> str:
    """Return a page that compares several runs: figures, overlaid curves and time breakdowns.

    See `render_page`.
    """
    charts: list[dict[str, Any]] = []
    ordered = best_first(runs)
    names = dict.fromkeys(name for run in runs for name in run.curves.names)
    varying = varying_hparams([run.hparams for run in ordered])
    drawn = [(_label(run, varying), run.curves) for run in ordered[:_MAX_CURVES]]
    shown = [_chart(name, place, drawn, charts) for place, name in enumerate(list(names)[:_MAX_METRICS])]
    ledgers = [
        (run.run_id, format_duration(run.breakdown.wall_us / 1e6), time_breakdown_rows(run.breakdown))
        for run in runs
    ]
    return render_page(
        "comparison.html.j2",
        live=live,
        title=" · ".join(run.run_id for run in runs),
        data={"charts": charts, "heats": []},
        runs=runs,
        charts=shown,
        curves_omitted=[run.run_id for run in ordered[_MAX_CURVES:]],
        figures=comparison_rows(runs),
        trials=make_trial_table(ordered),
        ledgers=[each for each in ledgers if each[2]],
        kinds=next((rows for _, _, rows in ledgers if rows), []),
        differences=spec_differences(runs),
    )


def _label(run: RunData, varying: Sequence[str]) -> str:
    """Return the name of a curve: the hyper-parameters that differ between the runs, or the run id."""
    words = [f"{name}={run.hparams[name]}" for name in varying if name in run.hparams]
    return f"{Path(run.folder).name}: {' '.join(words)}" if words else run.run_id


def _chart(
    name: str, place: int, runs: Sequence[tuple[str, MetricCurves]], charts: list[dict[str, Any]]
) -> dict[str, Any]:
    identity = f"metric-{place}"
    series = [
        curve_data(label, points, _MAX_POINTS, curves.not_finite(name))
        for label, curves in runs
        if (points := curves.points(name))
    ]
    charts.append(
        {"id": identity, "axis": "step", "height": 320 if place == 0 else 180, "series": series, "join": True}
    )
    return {"id": identity, "title": name, "log": name == "loss"}
