"""The page of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpctrain.telemetry.report.compare import differences, side_by_side
from hpctrain.telemetry.report.facts import Facts
from hpctrain.telemetry.report.html import render
from hpctrain.telemetry.report.page import ledger_rows, series
from hpctrain.telemetry.report.words import duration

_MOST_POINTS = 2000
_MOST_METRICS = 12
#: As many as the page has colours for.
_MOST_CURVES = 8


def render_comparison(runs: Sequence[Facts], *, live_s: int | None = None) -> str:
    """One page about several runs: figures, curves over one another, where the time of each went.

    See `render`.
    """
    charts: list[dict[str, Any]] = []
    names = dict.fromkeys(name for run in runs for name in run.curves.names)
    shown = [_chart(name, place, runs, charts) for place, name in enumerate(list(names)[:_MOST_METRICS])]
    ledgers = [(run.run_id, duration(run.ledger.wall_us / 1e6), ledger_rows(run.ledger)) for run in runs]
    return render(
        "comparison.html.j2",
        live_s=live_s,
        title=" · ".join(run.run_id for run in runs),
        data={"charts": charts, "heats": []},
        runs=runs,
        charts=shown,
        curves_left_out=[run.run_id for run in runs[_MOST_CURVES:]],
        figures=side_by_side(runs),
        ledgers=[each for each in ledgers if each[2]],
        kinds=next((rows for _, _, rows in ledgers if rows), []),
        differences=differences(runs),
    )


def _chart(name: str, place: int, runs: Sequence[Facts], charts: list[dict[str, Any]]) -> dict[str, Any]:
    identity = f"metric-{place}"
    curves = [
        series(run.run_id, points, _MOST_POINTS)
        for run in runs[:_MOST_CURVES]
        if (points := run.curves.points(name))
    ]
    charts.append(
        {"id": identity, "axis": "step", "height": 320 if place == 0 else 180, "series": curves, "join": True}
    )
    return {"id": identity, "title": name, "log": name == "loss"}
