"""Page of one run."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain.telemetry.accounting.time_breakdown import TimeBreakdown
from hpctrain.telemetry.report.advice import advise
from hpctrain.telemetry.report.artifacts import CheckpointRecord, count_saves
from hpctrain.telemetry.report.attempts import Attempt
from hpctrain.telemetry.report.device_metrics import COLUMNS, HeatMap, NodeSeries
from hpctrain.telemetry.report.html_renderer import LiveParts, render_page
from hpctrain.telemetry.report.jsonl import gc_disabled
from hpctrain.telemetry.report.metric_curves import CurvePoint, downsample
from hpctrain.telemetry.report.run_data import RunData, format_setting
from hpctrain.telemetry.report.summary import (
    CATEGORY_TEXT,
    describe_attempt_cost,
    describe_attempt_end,
    describe_follow_up,
    key_figures,
    summarize,
)
from hpctrain.telemetry.report.timeline import WIDTH, build_timeline
from hpctrain.telemetry.startup_parts import PART_TEXT, StartupDurations, StartupPart
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

#: Number of points of a large and a small chart: more than the pixel columns of a screen.
_MAX_POINTS, _MAX_SMALL_POINTS = 4000, 1000
_MAX_METRICS = 24
_LARGEST = 1e300
_MAX_ROWS = 200


@gc_disabled()
def render_run_page(run_data: RunData, *, live: LiveParts | None = None) -> str:
    """Return the page of one run. See `render_page`."""
    charts: list[dict[str, Any]] = []
    loss = _loss(run_data, charts)
    rate = _rate(run_data, charts)
    names = [name for name in run_data.curves.names if name != "loss"]
    metrics = [_metric(run_data, name, place, charts) for place, name in enumerate(names[:_MAX_METRICS])]
    attempts = _first_and_last(run_data.attempts)
    timeline = build_timeline(run_data) if run_data.breakdown.spans else None
    heats = list(_heats(run_data))
    return render_page(
        "report.html.j2",
        live=live,
        title=f"{run_data.run_id} · {run_data.state}",
        data={"charts": charts, "heats": [{**heat, "means": None} for heat in heats]},
        facts=run_data,
        subtitle=_subtitle(run_data),
        hparams=[(name, format_setting(value)) for name, value in run_data.hparams.items()],
        story=summarize(run_data),
        figures=key_figures(run_data),
        loss=loss,
        rate=rate,
        metrics=metrics,
        metrics_omitted=names[_MAX_METRICS:],
        timeline=timeline,
        drawn={bar.kind for bar in timeline.time.bars} if timeline else set(),
        has_faults=any(one.end in ("failure", "vanished", "failed") for one in run_data.attempts),
        has_stops=any(one.end == "stop" for one in run_data.attempts),
        ledger=time_breakdown_rows(run_data.breakdown),
        wall=format_duration(run_data.breakdown.wall_us / 1e6),
        startups=[_startup(one.number, one.startup) for one in attempts if one.startup is not None],
        attempts=[_attempt(one) for one in attempts],
        attempts_omitted=len(run_data.attempts) - len(attempts),
        heats=heats,
        nodes=[_node(one) for one in run_data.devices.nodes],
        advice=advise(run_data),
        environment=_environment(run_data),
        checkpoints=[_checkpoint(one) for one in run_data.checkpoints[:-13:-1]],
        checkpoint_words=_checkpoint_words(run_data.checkpoints),
        spec=[(name, format_setting(value)) for name, value in run_data.spec.items()],
    )


def time_breakdown_rows(breakdown: TimeBreakdown) -> list[dict[str, Any]]:
    """Return each category with its label and position in a bar; empty if the run has no time."""
    rows: list[dict[str, Any]] = []
    done = 0
    for what, us in breakdown.totals_us.items() if breakdown.wall_us else ():
        rows.append(
            {
                "name": what.value,
                "kind": what.name.lower(),
                "us": us,
                "x": round(WIDTH * done / breakdown.wall_us, 3),
                "width": round(WIDTH * us / breakdown.wall_us, 3),
                "share": format_share(us / breakdown.wall_us),
                "duration": format_duration(us / 1e6),
                "meaning": CATEGORY_TEXT[what],
                "measured": what in breakdown.measured,
            }
        )
        done += us
    return rows


def curve_data(
    name: str,
    points: Sequence[CurvePoint],
    most: int,
    not_finite: Iterable[tuple[int, str]] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return a curve for the script of the page, with labels for NaN or infinite points."""
    kept = downsample(points, most)
    xs = [x for x, _ in kept]
    drawn = set(xs)
    return {
        "name": name,
        "x": xs,
        # The script cannot sum larger values without overflow.
        "y": [y if y is None else min(max(y, -_LARGEST), _LARGEST) for _, y in kept],
        "not_finite": [[x, text] for x, text in not_finite if x in drawn],
        **more,
    }


def _not_finite_mark(not_finite: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """Return a mark at the first step at which a metric is NaN or infinite."""
    return [{"x": step, "label": text} for step, text in not_finite[:1]]


def _loss(run_data: RunData, charts: list[dict[str, Any]]) -> dict[str, Any] | None:
    points = run_data.curves.points("loss")
    if not points:
        return None
    not_finite = run_data.curves.not_finite("loss")
    shown = [curve_data("loss", points, _MAX_POINTS, not_finite)]
    if again := run_data.curves.points("loss", run_data.curves.superseded):
        shown.append(curve_data("repeated later", again, _MAX_POINTS, faint=True))
    marks = _restarts(run_data)
    charts.append(
        {
            "id": "loss-chart",
            "axis": "step",
            "height": 340,
            "series": shown,
            "marks": [*marks, *_not_finite_mark(not_finite)],
            "log": False,
        }
    )
    restarts = "Dashed lines mark restarts. " if marks else ""
    lost = "Faint lines show steps that were repeated later." if again else ""
    return {
        "id": "loss-chart",
        "title": "Loss",
        "what": "mean over the global batch, by optimizer step",
        "note": restarts + lost,
        "log": True,
    }


def _restarts(run_data: RunData) -> list[dict[str, Any]]:
    """Return marks at the steps from which attempts resumed."""
    attempts: dict[int, list[str]] = {}
    for attempt in run_data.attempts[1:]:
        step = attempt.resumed_step if attempt.resumed_step is not None else _before(attempt)
        if step is not None:
            attempts.setdefault(step, []).append(str(attempt.number))
    return [
        {"x": step, "label": f"attempt{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"}
        for step, numbers in attempts.items()
    ]


def _before(attempt: Attempt) -> int | None:
    return None if attempt.first_step is None else attempt.first_step - 1


def _rate(run_data: RunData, charts: list[dict[str, Any]]) -> dict[str, Any] | None:
    if not run_data.rates:
        return None
    shown = [curve_data("steps per second", run_data.rates, _MAX_POINTS)]
    marks = [
        {"x": attempt.started - run_data.start, "label": f"attempt {attempt.number}"}
        for attempt in run_data.attempts[1:]
    ]
    charts.append({"id": "rate", "axis": "time", "height": 220, "series": shown, "marks": marks})
    return {
        "id": "rate",
        "title": "Steps per second by time since submission",
        "note": f"median {format_number(run_data.steps_per_s)}",
    }


def _metric(run_data: RunData, name: str, place: int, charts: list[dict[str, Any]]) -> dict[str, Any]:
    points = run_data.curves.points(name)
    identity = f"metric-{place}"
    not_finite = run_data.curves.not_finite(name)
    shown = [curve_data(name, points, _MAX_SMALL_POINTS, not_finite)]
    marks = _not_finite_mark(not_finite)
    charts.append({"id": identity, "axis": "step", "height": 150, "series": shown, "marks": marks})
    return {"id": identity, "title": f"{name}: {run_data.curves.last_text(name)}", "log": False}


def _heats(run_data: RunData) -> Iterator[dict[str, Any]]:
    """Yield the heat maps of the GPUs and of the nodes, if there are measurements."""
    devices = run_data.devices
    hosts = [node.host for node in devices.nodes]
    for identity, rows, maps in (
        ("heat", devices.rows, devices.maps),
        ("nodes-heat", hosts, devices.node_maps),
    ):
        if maps:
            yield _heat(identity, rows, maps, run_data.end - run_data.start)


def _heat(identity: str, rows: Sequence[str], maps: Sequence[HeatMap], seconds: float) -> dict[str, Any]:
    return {
        "id": identity,
        "rows": rows,
        "columns": COLUMNS,
        "seconds": seconds,
        "maps": [
            {
                "name": each.quantity.name,
                "unit": each.quantity.unit,
                "most": each.most,
                "cells": base64.b64encode(each.cells).decode(),
            }
            for each in maps
        ],
        "means": [
            [row, *(format_number(_rounded(each.means[index])) for each in maps)]
            for index, row in enumerate(rows)
        ],
    }


def _node(node: NodeSeries) -> dict[str, Any]:
    kinds = Counter(node.gpu_names)
    troubles = [f"Xid {xid}" for xid in node.xids]
    if node.ecc_errors:
        troubles.append(pluralize(node.ecc_errors, "memory error"))
    troubles += [
        f"clock lowered by {reason} for {format_share(part)} of the time"
        for reason, part in node.throttled.items()
    ]
    return {
        "host": node.host,
        "gpus": ", ".join(f"{number_of} × {name}" for name, number_of in kinds.items()) or NOTHING,
        "cpus": NOTHING if node.cpus is None else node.cpus,
        "memory": format_size(node.memory_bytes),
        "troubles": ", ".join(troubles),
    }


def _environment(run_data: RunData) -> list[tuple[str, str]]:
    """Return rows with the environment of the ranks, then with the settings of the training."""
    known = {name: value for name, value in run_data.environment.items() if name not in ("time", "attempt")}
    settings = known.pop("settings", None)
    rows = [*known.items(), *(settings.items() if isinstance(settings, dict) else ())]
    return [(str(name), format_setting(value)) for name, value in rows if value is not None]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _subtitle(run_data: RunData) -> str:
    spec, parts = run_data.spec, []
    if script := spec.get("script"):
        args = spec.get("args")
        words = map(str, args) if isinstance(args, list) else ()
        parts.append(" ".join([Path(str(script)).name, *words])[:200])
    if attempt := next((one for one in reversed(run_data.attempts) if one.world_size), None):
        parts.append(f"{pluralize(attempt.world_size, 'rank')} on {pluralize(attempt.nodes, 'node')}")
    if run_data.breakdown.spans:
        parts.append(
            f"{format_time(run_data.start)} to {'now' if run_data.is_going else format_time(run_data.end)}"
        )
    if run_data.words:
        parts.append(run_data.words)
    return " · ".join(parts)


def _attempt(attempt: Attempt) -> dict[str, Any]:
    first, last = attempt.first_step, attempt.last_step
    return {
        "number": attempt.number,
        "started": format_clock(attempt.started),
        "steps": "–" if first is None else f"{first} – {last}",
        "ended": describe_attempt_end(attempt),
        "log": attempt.log if attempt.end == "failure" else None,
        "then": describe_follow_up(attempt),
        "cost": describe_attempt_cost(attempt),
    }


def _startup(attempt: int, startup: StartupDurations) -> dict[str, Any]:
    """Return the parts of an attempt's start, and a row per node."""
    return {
        "attempt": attempt,
        "seconds": format_duration(startup.seconds),
        "parts": [
            {
                "name": name,
                "median": format_duration(part.median),
                "max": format_duration(part.max),
                "host": part.host or "",
                "meaning": PART_TEXT[StartupPart(name)],
            }
            for name, part in startup.parts.items()
        ],
        "names": [name for name in startup.parts if name != StartupPart.JOB],
        "nodes": [
            (host, {name: format_duration(seconds) for name, seconds in spent.items()})
            for host, spent in startup.slowest_nodes.items()
        ],
    }


def _first_and_last(attempts: Sequence[Attempt]) -> list[Attempt]:
    if len(attempts) <= _MAX_ROWS:
        return list(attempts)
    return [*attempts[: _MAX_ROWS // 2], *attempts[-_MAX_ROWS // 2 :]]


def _checkpoint(checkpoint: CheckpointRecord) -> dict[str, Any]:
    words = [*(["kept"] if checkpoint.kept else []), *(["local tier"] if checkpoint.tier == "local" else [])]
    return {
        "step": "–" if checkpoint.step is None else checkpoint.step,
        "when": format_clock(checkpoint.time),
        "size": format_size(checkpoint.num_bytes),
        "seconds": format_duration(checkpoint.seconds),
        "stall": format_duration(checkpoint.seconds if checkpoint.stall_s is None else checkpoint.stall_s),
        "words": ", ".join(words),
    }


def _checkpoint_words(checkpoints: Sequence[CheckpointRecord]) -> str:
    kept = len({one.step for one in checkpoints if one.kept})
    shown = " Only the last twelve are shown." if len(checkpoints) > 12 else ""
    return f"{pluralize(count_saves(checkpoints), 'checkpoint')} written, {kept} still on disk.{shown}"
