"""Render the page of one run."""

from __future__ import annotations

import base64
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.telemetry.accounting.time_breakdown import TimeBreakdown
from hpctrain.telemetry.accounting.timeline_events import TimeCategory, TimeSpan
from hpctrain.telemetry.report.advice import advise
from hpctrain.telemetry.report.artifacts import count_saves
from hpctrain.telemetry.report.attempts import Attempt
from hpctrain.telemetry.report.device_metrics import COLUMNS, HeatMap
from hpctrain.telemetry.report.html_renderer import LiveParts, render_page
from hpctrain.telemetry.report.jsonl import gc_disabled
from hpctrain.telemetry.report.metric_curves import CurvePoint, downsample
from hpctrain.telemetry.report.run_data import RunData, format_setting
from hpctrain.telemetry.report.summary import (
    describe_attempt_cost,
    describe_attempt_end,
    describe_follow_up,
    key_figures,
    summarize,
)
from hpctrain.telemetry.startup_parts import PART_TEXT, StartupPart
from hpctrain.text import format_clock, format_duration, format_number, format_share, format_time, pluralize

#: Maximum number of points of a chart: more than the pixel columns of a screen.
_MAX_POINTS, _MAX_SMALL_POINTS = 4000, 1000
_MAX_METRICS, _MAX_ATTEMPTS, _MAX_CHECKPOINTS = 24, 200, 12
#: The script of the page cannot add larger values without overflow.
_LARGEST = 1e300
#: Number of horizontal units of the timeline.
_WIDTH = 1000
#: Number of nodes that the timeline shows initially, and after expanding.
_VISIBLE_HOSTS, _MAX_HOSTS = 12, 128
_TICK_INTERVALS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_ATTEMPT_COLUMNS = (describe_attempt_end, describe_follow_up, describe_attempt_cost)
_FAILED_ENDS = ("failure", "vanished", "failed")
_CATEGORY_TEXT = {
    TimeCategory.TRAINING: "training steps whose result was kept",
    TimeCategory.COMMUNICATING: "waiting for gradients of other ranks",
    TimeCategory.DATA: "waiting for the next batch",
    TimeCategory.VALIDATING: "running validation",
    TimeCategory.SAVING: "training paused for a save",
    TimeCategory.LOADING: "reading a checkpoint",
    TimeCategory.STARTING: "starting the ranks, up to their first step",
    TimeCategory.RESTARTING: "from the exit of the ranks to their restart",
    TimeCategory.LOST: "training steps that were repeated later",
    TimeCategory.QUEUED: "waiting for an allocation",
    TimeCategory.IDLE: "suspended, after the last step, or between submissions",
}


@dataclass(frozen=True)
class TimelineBar:
    """A rectangle; `y` and `height` are fractions of the row."""

    x: float
    width: float
    kind: str
    """A class of the style sheet."""
    title: str
    y: float = 0.0
    height: float = 1.0


@dataclass
class TimelineRow:
    """A row of the timeline."""

    name: str
    bars: list[TimelineBar] = field(default_factory=list)
    failed: bool = False


@dataclass
class Timeline:
    """The timeline of a run; nodes with failures are first if not all nodes are visible."""

    time: TimelineRow
    attempts: TimelineRow
    hosts: list[TimelineRow]
    more_hosts: list[TimelineRow]
    num_omitted: int
    ticks: list[tuple[float, str]]


@gc_disabled()
def render_run_page(run_data: RunData, *, live: LiveParts | None = None) -> str:
    """Return the page of one run. See `render_page`."""
    names = [name for name in run_data.curves.names if name != "loss"]
    loss, rate = _loss_chart(run_data), _rate_chart(run_data)
    metrics = [_metric_chart(run_data, name, index) for index, name in enumerate(names[:_MAX_METRICS])]
    attempts = run_data.attempts
    if len(attempts) > _MAX_ATTEMPTS:
        attempts = [*attempts[: _MAX_ATTEMPTS // 2], *attempts[-_MAX_ATTEMPTS // 2 :]]
    timeline = build_timeline(run_data) if run_data.breakdown.spans else None
    devices, seconds = run_data.devices, run_data.end - run_data.start
    hosts = [node.host for node in devices.nodes]
    heats = [
        _heat(identity, unit, rows, maps, seconds)
        for identity, unit, rows, maps in (
            ("heat", "GPU", devices.rows, devices.maps),
            ("nodes-heat", "node", hosts, devices.node_maps),
        )
        if maps
    ]
    return render_page(
        "report.html.j2",
        live=live,
        title=f"{run_data.run_id} · {run_data.state}",
        charts=[chart for chart in (loss, rate, *metrics) if chart],
        heats=heats,
        facts=run_data,
        subtitle=_subtitle(run_data),
        story=summarize(run_data),
        figures=key_figures(run_data),
        loss=loss,
        rate=rate,
        metrics=metrics,
        metrics_omitted=names[_MAX_METRICS:],
        timeline=timeline,
        drawn={bar.kind for bar in timeline.time.bars} if timeline else set(),
        has_faults=any(attempt.end in _FAILED_ENDS for attempt in run_data.attempts),
        has_stops=any(attempt.end == "stop" for attempt in run_data.attempts),
        ledger=time_breakdown_rows(run_data.breakdown),
        attempts=[(attempt, *(describe(attempt) for describe in _ATTEMPT_COLUMNS)) for attempt in attempts],
        startups=[(attempt.number, attempt.startup) for attempt in attempts if attempt.startup],
        startup_text={str(part): text for part, text in PART_TEXT.items()},
        job_part=StartupPart.JOB,
        advice=advise(run_data),
        settings=[(name, format_setting(value)) for name, value in run_data.spec.items()],
        environment=_environment(run_data.environment),
        checkpoints=run_data.checkpoints[: -_MAX_CHECKPOINTS - 1 : -1],
        num_saves=count_saves(run_data.checkpoints),
        num_kept=len({checkpoint.step for checkpoint in run_data.checkpoints if checkpoint.kept}),
    )


def time_breakdown_rows(breakdown: TimeBreakdown) -> list[dict[str, Any]]:
    """Return each category with its label and position in a bar; empty if the run has no time."""
    rows: list[dict[str, Any]] = []
    done_us = 0
    for category, us in breakdown.totals_us.items() if breakdown.wall_us else ():
        rows.append(
            {
                "name": category.value,
                "kind": category.name.lower(),
                "us": us,
                "x": round(_WIDTH * done_us / breakdown.wall_us, 3),
                "width": round(_WIDTH * us / breakdown.wall_us, 3),
                "share": format_share(us / breakdown.wall_us),
                "duration": format_duration(us / 1e6),
                "meaning": _CATEGORY_TEXT[category],
                "measured": category in breakdown.measured,
            }
        )
        done_us += us
    return rows


def curve_data(
    name: str,
    points: Sequence[CurvePoint],
    most: int,
    not_finite: Sequence[tuple[int, str]] = (),
    *,
    faint: bool = False,
) -> dict[str, Any]:
    """Return a curve for the script of the page, with labels for NaN or infinite points."""
    kept = downsample(points, most)
    xs = [x for x, _ in kept]
    drawn = set(xs)
    return {
        "name": name,
        "x": xs,
        "y": [y if y is None else min(max(y, -_LARGEST), _LARGEST) for _, y in kept],
        "not_finite": [[x, text] for x, text in not_finite if x in drawn],
        "faint": faint,
    }


def _loss_chart(run_data: RunData) -> dict[str, Any] | None:
    curves = run_data.curves
    if not (points := curves.points("loss")):
        return None
    not_finite = curves.not_finite("loss")
    series = [curve_data("loss", points, _MAX_POINTS, not_finite)]
    note = ""
    if marks := _resume_marks(run_data.attempts):
        note = "Dashed lines mark restarts. "
    if repeated := curves.points("loss", curves.superseded):
        series.append(curve_data("repeated later", repeated, _MAX_POINTS, faint=True))
        note += "Faint lines show steps that were repeated later."
    return {
        "id": "loss-chart",
        "title": "mean over the global batch, by optimizer step",
        "note": note,
        "axis": "step",
        "height": 340,
        "series": series,
        "marks": marks + _not_finite_mark(not_finite),
    }


def _resume_marks(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Return marks at the steps from which attempts resumed."""
    numbers: dict[int, list[str]] = {}
    for attempt in attempts[1:]:
        step = attempt.resumed_step
        if step is None and attempt.first_step is not None:
            step = attempt.first_step - 1
        if step is not None:
            numbers.setdefault(step, []).append(str(attempt.number))
    return [
        {"x": step, "label": f"attempt{'s' if len(resumed) > 1 else ''} {', '.join(resumed)}"}
        for step, resumed in numbers.items()
    ]


def _not_finite_mark(not_finite: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    return [{"x": step, "label": text} for step, text in not_finite[:1]]


def _rate_chart(run_data: RunData) -> dict[str, Any] | None:
    if not run_data.rates:
        return None
    return {
        "id": "rate",
        "title": "Steps per second by time since submission",
        "note": f"median {format_number(run_data.steps_per_s)}",
        "axis": "time",
        "height": 220,
        "series": [curve_data("steps per second", run_data.rates, _MAX_POINTS)],
        "marks": [
            {"x": attempt.started - run_data.start, "label": f"attempt {attempt.number}"}
            for attempt in run_data.attempts[1:]
        ],
    }


def _metric_chart(run_data: RunData, name: str, index: int) -> dict[str, Any]:
    curves = run_data.curves
    not_finite = curves.not_finite(name)
    return {
        "id": f"metric-{index}",
        "title": f"{name}: {curves.last_text(name)}",
        "axis": "step",
        "height": 150,
        "series": [curve_data(name, curves.points(name), _MAX_SMALL_POINTS, not_finite)],
        "marks": _not_finite_mark(not_finite),
    }


def _heat(
    identity: str, unit: str, rows: Sequence[str], maps: Sequence[HeatMap], seconds: float
) -> dict[str, Any]:
    return {
        "id": identity,
        "unit": unit,
        "rows": rows,
        "columns": COLUMNS,
        "seconds": seconds,
        "maps": [
            {
                "name": heat_map.quantity.name,
                "unit": heat_map.quantity.unit,
                "most": heat_map.most,
                "cells": base64.b64encode(heat_map.cells).decode(),
                "means": [None if mean is None else round(mean, 1) for mean in heat_map.means],
            }
            for heat_map in maps
        ],
    }


def _environment(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows with the environment of the ranks, then with the settings of the training."""
    settings = environment.get("settings")
    rows = {
        **{name: value for name, value in environment.items() if name not in ("time", "attempt", "settings")},
        **(settings if isinstance(settings, dict) else {}),
    }
    return [(str(name), format_setting(value)) for name, value in rows.items() if value is not None]


def _subtitle(run_data: RunData) -> str:
    texts = []
    if script := run_data.spec.get("script"):
        args = run_data.spec.get("args")
        command = [Path(str(script)).name, *map(str, args if isinstance(args, list) else ())]
        texts.append(" ".join(command)[:200])
    if attempt := next((attempt for attempt in reversed(run_data.attempts) if attempt.world_size), None):
        texts.append(f"{pluralize(attempt.world_size, 'rank')} on {pluralize(attempt.nodes, 'node')}")
    if run_data.breakdown.spans:
        end = "now" if run_data.is_going else format_time(run_data.end)
        texts.append(f"{format_time(run_data.start)} to {end}")
    return " · ".join(filter(None, [*texts, run_data.words]))


def build_timeline(run_data: RunData) -> Timeline:
    """Return the timeline of a run with at least one record."""
    start, end = run_data.start, max(run_data.end, run_data.start + 1e-6)

    def x(time: float) -> float:
        return round(min(max((time - start) / (end - start), 0.0), 1.0) * _WIDTH, 2)

    attempts, hosts = TimelineRow("attempts"), dict[str, TimelineRow]()
    ends = [*(attempt.started for attempt in run_data.attempts[1:]), end]
    for attempt, next_start in zip(run_data.attempts, ends, strict=False):  # Without attempts, `end` remains.
        ended = next_start if attempt.ended is None else attempt.ended
        title = f"attempt {attempt.number}, {format_clock(attempt.started)}: {describe_attempt_end(attempt)}"
        left = x(attempt.started)
        width = max(1.0, x(ended) - left)
        attempts.bars.append(TimelineBar(left, width, "attempt", title))
        for host in attempt.hosts:
            row = hosts.setdefault(host, TimelineRow(host))
            row.bars.append(TimelineBar(left, width, "host", f"{host}: {title}"))
            if host == attempt.host:
                row.bars.append(TimelineBar(x(ended) - 1.5, 3, "fault", f"{host}: {attempt.cause}"))
                row.failed = True
        if attempt.interrupted:
            kind = "stop" if attempt.end == "stop" else "fault"
            attempts.bars.append(TimelineBar(x(ended) - 1.5, 3, kind, title))
    rows = list(hosts.values())
    if len(rows) > _VISIBLE_HOSTS:
        rows = sorted(rows, key=lambda row: not row.failed)[:_MAX_HOSTS]
    time_row = TimelineRow("time", _category_bars(run_data.breakdown.spans))
    last_x = -2.0
    for checkpoint in run_data.checkpoints:
        if (at := x(checkpoint.time)) >= last_x + 2:
            title = f"checkpoint of step {checkpoint.step}, {format_clock(checkpoint.time)}"
            time_row.bars.append(TimelineBar(at - 0.6, 1.2, "save", title, y=0.72, height=0.28))
            last_x = at
    return Timeline(
        time=time_row,
        attempts=attempts,
        hosts=rows[:_VISIBLE_HOSTS],
        more_hosts=rows[_VISIBLE_HOSTS:],
        num_omitted=len(hosts) - len(rows),
        ticks=list(_ticks(end - start)),
    )


def _category_bars(spans: tuple[TimeSpan, ...]) -> list[TimelineBar]:
    """Return the dominant category of each unit; units of equal category are merged."""
    first, last = spans[0].start_us, spans[-1].end_us
    starts = [span.start_us for span in spans]
    runs: list[tuple[TimeCategory, int, int]] = []
    for column in range(_WIDTH):
        begin = first + (last - first) * column // _WIDTH
        end = first + (last - first) * (column + 1) // _WIDTH
        totals: dict[TimeCategory, int] = {}
        index = bisect_right(starts, begin) - 1
        while index < len(spans) and (span := spans[index]).start_us < end:
            us = min(end, span.end_us) - max(begin, span.start_us)
            totals[span.category] = totals.get(span.category, 0) + us
            index += 1
        category = max(totals, key=lambda category: totals[category], default=TimeCategory.IDLE)
        if runs and runs[-1][0] is category:
            runs[-1] = (category, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((category, column, 1))
    unit_s = (last - first) / _WIDTH / 1e6
    return [
        TimelineBar(
            left, width, category.name.lower(), f"{category.value}, about {format_duration(width * unit_s)}"
        )
        for category, left, width in runs
    ]


def _ticks(seconds: float) -> Iterator[tuple[float, str]]:
    """Yield up to ten round times since the start, with their positions."""
    interval = next((interval for interval in _TICK_INTERVALS_S if seconds / interval <= 8), None)
    for time in range(0, int(seconds) + 1, interval or 86400 * -(-round(seconds) // (86400 * 8))):
        if time < 0.97 * seconds:
            yield round(_WIDTH * time / seconds, 2), f"{time} s" if time < 60 else format_duration(time)
