"""Render the page of one run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hpctrain.telemetry.accounting.timeline_events import TimeCategory
from hpctrain.telemetry.report.advice import advise
from hpctrain.telemetry.report.artifacts import count_saves, gc_disabled
from hpctrain.telemetry.report.attempts import Attempt
from hpctrain.telemetry.report.device_metrics import GPU_QUANTITIES, NODE_QUANTITIES
from hpctrain.telemetry.report.html_renderer import LiveParts, chart, curve, render_page, time_breakdown_rows
from hpctrain.telemetry.report.run_data import RunData, format_setting
from hpctrain.telemetry.report.summary import (
    describe_attempt_cost,
    describe_attempt_end,
    describe_follow_up,
    key_figures,
    summarize,
)
from hpctrain.telemetry.startup_parts import PART_TEXT
from hpctrain.text import format_clock, format_duration, format_number, format_time, pluralize

_MAX_METRICS, _MAX_ATTEMPTS, _MAX_CHECKPOINTS = 24, 200, 12
#: Number of horizontal units of the timeline, and of times below it.
_WIDTH, _NUM_TICKS = 1000, 6
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


@gc_disabled()
def render_run_page(run_data: RunData, *, live: LiveParts | None = None) -> str:
    """Return the page of one run. See `render_page`."""
    names = [name for name in run_data.curves.names if name != "loss"]
    attempts = run_data.attempts
    if len(attempts) > _MAX_ATTEMPTS:
        attempts = [*attempts[: _MAX_ATTEMPTS // 2], *attempts[-_MAX_ATTEMPTS // 2 :]]
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
        breakdown=time_breakdown_rows(run_data.breakdown),
        category_text={category.value: text for category, text in _CATEGORY_TEXT.items()},
        attempts=[
            (
                attempt,
                describe_attempt_end(attempt),
                describe_follow_up(attempt),
                describe_attempt_cost(attempt),
            )
            for attempt in attempts
        ],
        startups=[(attempt.number, attempt.startup) for attempt in attempts if attempt.startup],
        startup_text={str(part): text for part, text in PART_TEXT.items()},
        advice=advise(run_data),
        devices=[
            (unit, rows, means, {name: title for name, (title, _) in quantities.items() if name in means[0]})
            for unit, rows, means, quantities in (
                ("GPU", run_data.devices.gpus, run_data.devices.gpu_means, GPU_QUANTITIES),
                (
                    "node",
                    [node.host for node in run_data.devices.nodes],
                    run_data.devices.node_means,
                    NODE_QUANTITIES,
                ),
            )
            if rows
        ],
        settings=[(name, format_setting(value)) for name, value in run_data.spec.items()],
        environment=_environment(run_data.environment),
        checkpoints=run_data.checkpoints[: -_MAX_CHECKPOINTS - 1 : -1],
        num_saves=count_saves(run_data.checkpoints),
        num_kept=len({checkpoint.step for checkpoint in run_data.checkpoints if checkpoint.kept}),
    )


def _loss_chart(run_data: RunData) -> list[dict[str, Any]]:
    curves = run_data.curves
    if not (points := curves.points("loss")):
        return []
    not_finite = curves.not_finite("loss")
    series, note = [curve("loss", points, not_finite)], ""
    if marks := _resume_marks(run_data.attempts):
        note = "Dashed lines mark restarts. "
    if repeated := curves.superseded_points("loss"):
        series.append(curve("repeated later", repeated, faint=True))
        note += "Faint lines show steps that were repeated later."
    title = "Loss: mean over the global batch, by optimizer step"
    return [chart("loss-chart", title, series, height=340, note=note, marks=[*marks, *not_finite[:1]])]


def _resume_marks(attempts: Sequence[Attempt]) -> list[tuple[float, str]]:
    """Return marks at the steps from which attempts resumed."""
    numbers: dict[int, list[str]] = {}
    for attempt in attempts[1:]:
        step = attempt.resumed_step
        if step is None and attempt.first_step is not None:
            step = attempt.first_step - 1
        if step is not None:
            numbers.setdefault(step, []).append(str(attempt.number))
    return [
        (step, f"attempt{'s' if len(resumed) > 1 else ''} {', '.join(resumed)}")
        for step, resumed in numbers.items()
    ]


def _rate_chart(run_data: RunData) -> list[dict[str, Any]]:
    if not run_data.rates:
        return []
    return [
        chart(
            "rate",
            "Steps per second by time since submission",
            [curve("steps per second", run_data.rates)],
            axis="time",
            height=220,
            note=f"median {format_number(run_data.steps_per_s)}",
            marks=[
                (attempt.started - run_data.start, f"attempt {attempt.number}")
                for attempt in run_data.attempts[1:]
            ],
        )
    ]


def _metric_chart(run_data: RunData, name: str, index: int) -> dict[str, Any]:
    not_finite = run_data.curves.not_finite(name)
    series = [curve(name, run_data.curves.points(name), not_finite)]
    title = f"{name}: {run_data.curves.last_text(name)}"
    return chart(f"metric-{index}", title, series, marks=not_finite[:1])


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


def build_timeline(run_data: RunData) -> dict[str, list[dict[str, Any]]]:
    """Return the timeline of a run with at least one record, as bars in rows, and the times below them."""
    start, seconds = run_data.start, max(run_data.end - run_data.start, 1e-6)

    def x(time: float) -> float:
        return round(min(max((time - start) / seconds, 0.0), 1.0) * _WIDTH, 2)

    def bar(left: float, width: float, kind: str, title: str) -> dict[str, Any]:
        return {"x": left, "width": width, "kind": kind, "title": title}

    spans = run_data.breakdown.spans
    starts = [span.start_us for span in spans]
    unit_us = (spans[-1].end_us - spans[0].start_us) / _WIDTH
    # The category in the middle of each unit.
    times_us = (spans[0].start_us + (unit + 0.5) * unit_us for unit in range(_WIDTH))
    categories = [spans[bisect_right(starts, time_us) - 1].category for time_us in times_us]
    time_bars, left = [], 0
    for category, units in groupby(categories):
        width = len(list(units))
        duration = format_duration(width * unit_us / 1e6)
        time_bars.append(bar(left, width, category.name.lower(), f"{category.value}, about {duration}"))
        left += width
    saves = {
        x(checkpoint.time): f"checkpoint of step {checkpoint.step}, {format_clock(checkpoint.time)}"
        for checkpoint in run_data.checkpoints
    }
    attempt_bars = []
    ends = [*(attempt.started for attempt in run_data.attempts[1:]), run_data.end]
    for attempt, next_start in zip(
        run_data.attempts, ends, strict=False
    ):  # Without attempts, the end remains.
        end = x(next_start if attempt.ended is None else attempt.ended)
        title = f"attempt {attempt.number}, {format_clock(attempt.started)}: {describe_attempt_end(attempt)}"
        attempt_bars.append(bar(x(attempt.started), max(1.0, end - x(attempt.started)), "attempt", title))
        if attempt.interrupted:
            kind = "stop" if attempt.end == "stop" else "fault"
            attempt_bars.append(bar(end - 1.5, 3, kind, title))
    return {
        "time": time_bars,
        "saves": [bar(at - 0.6, 1.2, "save", title) for at, title in saves.items()],
        "attempts": attempt_bars,
        "ticks": [
            {"x": 100 * tick / _NUM_TICKS, "text": format_duration(seconds * tick / _NUM_TICKS)}
            for tick in range(_NUM_TICKS)
        ],
    }
