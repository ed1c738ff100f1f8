"""Render self-contained HTML pages of runs, in which no content of a run is executed."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from hpctrain._version import __version__
from hpctrain.rundir import RunDir
from hpctrain.telemetry.accounting.time_breakdown import TimeBreakdown
from hpctrain.telemetry.accounting.timeline_events import TimeCategory
from hpctrain.telemetry.hparams import varying_hparams
from hpctrain.telemetry.report.advice import advise
from hpctrain.telemetry.report.device_metrics import GPU_QUANTITIES, NODE_QUANTITIES
from hpctrain.telemetry.report.metric_curves import CurvePoint, downsample
from hpctrain.telemetry.report.run_data import RunData, format_setting
from hpctrain.telemetry.report.run_results import (
    common_ranking,
    count_saves,
    find_best,
    gc_disabled,
    rank_key,
)
from hpctrain.telemetry.report.summary import (
    describe_attempt_cost,
    describe_attempt_end,
    describe_follow_up,
    key_figures,
    summarize,
)
from hpctrain.telemetry.startup_parts import PART_TEXT
from hpctrain.text import (
    NOTHING,
    format_clock,
    format_duration,
    format_number,
    format_share,
    format_size,
    format_time,
    pluralize,
)

_ASSETS = Path(__file__).resolve().parents[1] / "assets"
#: The script of the page cannot add larger values without overflow.
_LARGEST = 1e300
#: Maximum number of points of a curve (more than the pixel columns of a screen), and of curves in a chart.
_MAX_POINTS, _MAX_CURVES = 2000, 8
_MAX_METRICS, _MAX_ATTEMPTS, _MAX_CHECKPOINTS = 24, 200, 12
#: Number of horizontal units of the timeline, and of times below it.
_WIDTH, _NUM_TICKS = 1000, 6
#: Fields of a specification that are unique to each run.
_UNIQUE_FIELDS = frozenset({"run_id", "run_dir", "code"})
_ATTEMPT_COLUMNS = (describe_attempt_end, describe_follow_up, describe_attempt_cost)
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
class LiveParts:
    """Parts of a page that only `hpctrain serve` shows."""

    interval_s: int
    """Seconds between two polls of the server for updates."""
    logs: Sequence[tuple[str, str]] = ()
    """Names of logs, each with its last lines."""


def page_url(run_ids: Sequence[str]) -> str:
    """Return the path of the page of a run, of the comparison of several, or without runs, of the list."""
    if len(run_ids) > 1:
        return f"/compare?{urlencode([('run', run_id) for run_id in run_ids])}"
    # The id of an array task contains a slash, resumed is escaped.
    return f"/run/{quote(run_ids[0], safe='')}" if run_ids else "/"


def render_page(
    template: str,
    *,
    title: str,
    charts: Sequence[Mapping[str, Any]] = (),
    live: LiveParts | None = None,
    **context: Any,
) -> str:
    """Render a template; all content of the run is escaped, or part of a JSON block for the charts."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "clock": format_clock,
        "duration": format_duration,
        "number": format_number,
        "page_url": lambda run_id: page_url([run_id]),
        "plural": pluralize,
        "setting": format_setting,
        "size": format_size,
    }
    style = _asset("uPlot.min.css") + _asset("report.css")
    library, script = _asset("uPlot.iife.min.js"), _asset("report.js")
    targets = "connect-src 'self'; form-action 'self'" if live else "form-action 'none'"
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src {_hash(style)}; "
        f"{targets}; base-uri 'none'"
    )
    data = json.dumps({"charts": charts}, separators=(",", ":"), allow_nan=False)
    # In a script element, JSON must not contain an end tag or a comment.
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return environment.get_template(template).render(
        title=title,
        policy=Markup(policy),
        style=Markup(style),
        library=Markup(library),
        script=Markup(script),
        data=Markup(data),
        charts=charts,
        version=__version__,
        made=format_time(time.time()),
        zone=time.strftime("%Z"),
        live=live,
        **context,
    )


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the CSP hash source of a script or style sheet (W3C, CSP Level 3, section 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _chart(
    identity: str,
    title: str,
    curves: Sequence[Mapping[str, Any]],
    *,
    height: int = 150,
    note: str = "",
    marks: Sequence[tuple[float, str]] = (),
) -> dict[str, Any]:
    drawn_marks = [{"x": x, "label": label} for x, label in marks]
    texts = {"id": identity, "title": title, "note": note}
    return {**texts, "height": height, "series": curves, "marks": drawn_marks}


def _curve(
    name: str,
    points: Sequence[CurvePoint],
    not_finite: Sequence[tuple[int, str]] = (),
    *,
    faint: bool = False,
) -> dict[str, Any]:
    """Return a curve of a chart, with labels for NaN or infinite points."""
    drawn = downsample(points, _MAX_POINTS)
    xs = [x for x, _ in drawn]
    labels = [[x, text] for x, text in not_finite if x in set(xs)] if not_finite else []
    ys = [y if y is None else min(max(y, -_LARGEST), _LARGEST) for _, y in drawn]
    return {"name": name, "x": xs, "y": ys, "not_finite": labels, "faint": faint}


@gc_disabled()
def render_run_page(run_data: RunData, *, live: LiveParts | None = None) -> str:
    """Return the page of one run. See `render_page`."""
    names = [name for name in run_data.curves.names if name != "loss"]
    attempts = run_data.attempts
    if len(attempts) > _MAX_ATTEMPTS:
        attempts = [*attempts[: _MAX_ATTEMPTS // 2], *attempts[-_MAX_ATTEMPTS // 2 :]]
    devices = run_data.devices
    measured = (
        ("GPU", devices.gpus, devices.gpu_means, GPU_QUANTITIES),
        ("node", [node.host for node in devices.nodes], devices.node_means, NODE_QUANTITIES),
    )
    return render_page(
        "report.html.j2",
        live=live,
        title=f"{run_data.run_id} · {run_data.state}",
        charts=[
            *_loss_chart(run_data),
            *_rate_chart(run_data),
            *(_metric_chart(run_data, name, index) for index, name in enumerate(names[:_MAX_METRICS])),
        ],
        run=run_data,
        subtitle=_subtitle(run_data),
        story=summarize(run_data),
        figures=key_figures(run_data),
        metrics_omitted=names[_MAX_METRICS:],
        timeline=build_timeline(run_data) if run_data.breakdown.spans else None,
        breakdown=_breakdown_rows(run_data.breakdown),
        attempts=[(attempt, *(describe(attempt) for describe in _ATTEMPT_COLUMNS)) for attempt in attempts],
        startups=[(attempt.number, attempt.startup) for attempt in attempts if attempt.startup],
        startup_text={str(part): text for part, text in PART_TEXT.items()},
        advice=advise(run_data),
        devices=[
            (unit, rows, means, {name: title for name, (title, _) in quantities.items() if name in means[0]})
            for unit, rows, means, quantities in measured
            if rows
        ],
        settings=[(name, format_setting(value)) for name, value in run_data.spec.items()],
        environment=_environment(run_data.environment),
        checkpoints=run_data.checkpoints[: -_MAX_CHECKPOINTS - 1 : -1],
        script_checkpoints=run_data.script_checkpoints[: -_MAX_CHECKPOINTS - 1 : -1],
        num_saves=count_saves(run_data.checkpoints),
        num_kept=len({checkpoint.step for checkpoint in run_data.checkpoints if checkpoint.kept}),
    )


def _breakdown_rows(breakdown: TimeBreakdown) -> list[dict[str, Any]]:
    return [
        {
            "name": category.value,
            "kind": category.name.lower(),
            "us": us,
            "share": format_share(us / breakdown.wall_us if category in breakdown.measured else None),
            "duration": format_duration(us / 1e6 if category in breakdown.measured else None),
            "meaning": _CATEGORY_TEXT[category]
            + ("" if category in breakdown.measured else "; not measured, included in training"),
        }
        for category, us in breakdown.totals_us.items()
        if breakdown.wall_us
    ]


def _loss_chart(run_data: RunData) -> list[dict[str, Any]]:
    curves = run_data.curves
    if not (points := curves.points("loss")):
        return []
    not_finite, note = curves.not_finite("loss"), ""
    series = [_curve("loss", points, not_finite)]
    if marks := _resume_marks(run_data):
        note = "Dashed lines mark restarts. "
    if repeated := curves.superseded_points("loss"):
        series.append(_curve("repeated later", repeated, faint=True))
        note += "Faint lines show steps that were repeated later."
    title = "Loss: mean over the global batch, by optimizer step"
    return [_chart("loss-chart", title, series, height=340, note=note, marks=[*marks, *not_finite[:1]])]


def _resume_marks(run_data: RunData) -> list[tuple[float, str]]:
    """Return marks at the steps from which attempts resumed."""
    numbers: dict[int, list[str]] = {}
    for attempt in run_data.attempts[1:]:
        step = attempt.resumed_step
        if step is None and attempt.first_step is not None:
            step = attempt.first_step - 1
        if step is not None:
            numbers.setdefault(step, []).append(str(attempt.number))
    return [
        (step, f"attempt{'s' * (len(resumed) > 1)} {', '.join(resumed)}") for step, resumed in numbers.items()
    ]


def _rate_chart(run_data: RunData) -> list[dict[str, Any]]:
    if not run_data.rates:
        return []
    curves = [_curve("steps per second", run_data.rates)]
    note = f"median {format_number(run_data.steps_per_s)}"
    return [_chart("rate", "Steps per second", curves, height=220, note=note, marks=_resume_marks(run_data))]


def _metric_chart(run_data: RunData, name: str, index: int) -> dict[str, Any]:
    not_finite = run_data.curves.not_finite(name)
    curves = [_curve(name, run_data.curves.points(name), not_finite)]
    title = f"{name}: {run_data.curves.last_text(name)}"
    return _chart(f"metric-{index}", title, curves, marks=not_finite[:1])


def _environment(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings = environment.get("settings")
    rows = {name: value for name, value in environment.items() if name not in ("time", "attempt", "settings")}
    rows |= settings if isinstance(settings, dict) else {}
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


def build_timeline(run_data: RunData) -> dict[str, list[dict[str, Any]]]:
    """Return the timeline of a run with at least one record, as bars in rows, and the times below them."""
    start, seconds = run_data.start, max(run_data.end - run_data.start, 1e-6)

    def x(time: float) -> float:
        return round(min(max((time - start) / seconds, 0.0), 1.0) * _WIDTH, 2)

    def bar(x: float, width: float, kind: str, title: str) -> dict[str, Any]:
        return {"x": x, "width": width, "kind": kind, "title": title}

    spans = run_data.breakdown.spans
    starts = [span.start_us for span in spans]
    unit_us = (spans[-1].end_us - spans[0].start_us) / _WIDTH
    # The category in the middle of each unit.
    times_us = (spans[0].start_us + (unit + 0.5) * unit_us for unit in range(_WIDTH))
    categories = [spans[bisect_right(starts, time_us) - 1].category for time_us in times_us]
    time_bars, unit = [], 0
    for category, group in groupby(categories):
        width = len(list(group))
        duration = format_duration(width * unit_us / 1e6)
        time_bars.append(bar(unit, width, category.name.lower(), f"{category.value}, about {duration}"))
        unit += width
    saves = {
        x(checkpoint.time): f"checkpoint of step {checkpoint.step}, {format_clock(checkpoint.time)}"
        for checkpoint in run_data.checkpoints
    }
    attempt_bars = []
    # Without attempts, only the end remains.
    ends = [*(attempt.started for attempt in run_data.attempts[1:]), run_data.end]
    for attempt, next_start in zip(run_data.attempts, ends, strict=False):
        end = x(next_start if attempt.ended is None else attempt.ended)
        title = f"attempt {attempt.number}, {format_clock(attempt.started)}: {describe_attempt_end(attempt)}"
        attempt_bars.append(bar(x(attempt.started), max(1.0, end - x(attempt.started)), "attempt", title))
        if attempt.interrupted:
            attempt_bars.append(bar(end - 1.5, 3, "stop" if attempt.end == "stop" else "fault", title))
    return {
        "time": time_bars,
        "saves": [bar(at - 0.6, 1.2, "save", title) for at, title in saves.items()],
        "attempts": attempt_bars,
        "ticks": [
            {"x": 100 * tick / _NUM_TICKS, "text": format_duration(seconds * tick / _NUM_TICKS)}
            for tick in range(_NUM_TICKS)
        ],
    }


def render_comparison(runs: Sequence[RunData], *, live: LiveParts | None = None) -> str:
    """Return a page that compares several runs: figures, overlaid curves and time breakdowns."""
    varying = varying_hparams([run.hparams for run in runs])
    ordered = _best_first(runs) if varying else list(runs)
    names = list(dict.fromkeys(name for run in runs for name in run.curves.names))

    def curves(name: str) -> list[dict[str, Any]]:
        return [
            _curve(_label(run, varying), points, run.curves.not_finite(name))
            for run in ordered[:_MAX_CURVES]
            if (points := run.curves.points(name))
        ]

    shares = ({row["name"]: row["share"] for row in _breakdown_rows(run.breakdown)} for run in ordered)
    return render_page(
        "comparison.html.j2",
        live=live,
        title=" · ".join(run.run_id for run in runs),
        charts=[
            _chart(f"metric-{index}", name, curves(name), height=180 if index else 320)
            for index, name in enumerate(names[:_MAX_METRICS])
        ],
        num_runs=len(runs),
        curves_omitted=[run.run_id for run in ordered[_MAX_CURVES:]],
        figures=_rows([_figures(run, varying) for run in ordered]),
        breakdown=_rows([{"run": run.run_id, **row} for run, row in zip(ordered, shares, strict=True)]),
        differences=[["", *(run.run_id for run in ordered)], *spec_differences(ordered)],
    )


def _label(run: RunData, varying: Sequence[str]) -> str:
    hparams = " ".join(f"{name}={run.hparams[name]}" for name in varying if name in run.hparams)
    return f"{Path(run.folder).name}: {hparams}" if hparams else run.run_id


def _best_first(runs: Sequence[RunData]) -> list[RunData]:
    """Sort runs by the best values of their common metric."""
    metric, mode = common_ranking(run.best for run in runs)
    if metric is None:
        return list(runs)
    ranked = []
    for run in runs:
        best = run.best
        if best is None or (best.metric, best.mode) != (metric, mode):
            best = find_best(RunDir(Path(run.folder)).checkpoints, run.curves, run.environment, metric, mode)
        ranked.append(copy(run))
        ranked[-1].best = best
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
