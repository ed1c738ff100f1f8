"""Runs by their hyper-parameters: a table, best first, and parallel coordinates."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.rundir import RunDir
from hpctrain.telemetry.hparams import HparamValue, varying_hparams
from hpctrain.telemetry.report.run_data import RunData, format_setting
from hpctrain.telemetry.report.run_results import common_ranking, find_best, rank_key
from hpctrain.text import NOTHING, format_count, format_number

#: Size of the drawing, and its largest number of axes.
_WIDTH, _HEIGHT, _MAX_AXES = 1000, 260, 10
#: Values over at least this ratio are drawn on a logarithmic axis, and all learning rates.
_LOG_RATIO = 10.0
_LEARNING_RATE = re.compile(r"(.*[._])?(lr|learning_rate)")


@dataclass(frozen=True)
class TrialTable:
    """Table of runs, best first, and their lines in parallel coordinates."""

    titles: list[str]
    rows: list[list[str]]
    axes: list[dict[str, Any]]
    """Name, position, and labels of each axis; empty if less than two hyper-parameters or runs differ."""
    lines: list[dict[str, Any]]
    """Name, points and opacity of each run, worst first, so that the best are drawn on top."""
    height: int = _HEIGHT


def best_first(runs: Sequence[RunData]) -> list[RunData]:
    """Sort runs by the best values of their common metric, if their hyper-parameters differ."""
    ranking = common_ranking(run.best for run in runs)
    if ranking[0] is None or not varying_hparams([run.hparams for run in runs]):
        return list(runs)
    folders = [RunDir(Path(run.folder)) for run in runs]
    ranked = [
        run
        if run.best and (run.best.metric, run.best.mode) == ranking
        else replace(run, best=find_best(folder.checkpoints, run.curves, run.environment, *ranking))
        for run, folder in zip(runs, folders, strict=True)
    ]
    return sorted(ranked, key=lambda run: rank_key(run.best))


def make_trial_table(ordered: Sequence[RunData]) -> TrialTable | None:
    """Return the table of runs, as sorted by `best_first`; None if no hyper-parameters differ."""
    names = varying_hparams([run.hparams for run in ordered])
    if not names:
        return None
    best = ordered[0].best

    def value_of(run: RunData) -> float | None:
        return run.best.value if run.best else None

    metric = f"{best.metric} (best)" if best is not None else "best"
    rows = [
        [
            run.run_id,
            run.state,
            *(format_setting(run.hparams[name]) if name in run.hparams else NOTHING for name in names),
            format_number(value_of(run)),
            format_count(run.best.step) if value_of(run) is not None and run.best else NOTHING,
        ]
        for run in ordered
    ]
    columns: dict[str, list[HparamValue]] = {
        name: [run.hparams.get(name) for run in ordered] for name in names[: _MAX_AXES - 1]
    }
    columns[metric] = [value_of(run) for run in ordered]
    drawn = [place for place, run in enumerate(ordered) if value_of(run) is not None]
    axes, positions = [], []
    for number, (name, values) in enumerate(columns.items()):
        ys, low, high = _scale(name, [values[place] for place in drawn])
        x = round(60 + number * (_WIDTH - 120) / max(1, len(columns) - 1), 1)
        axes.append({"name": name, "x": x, "low": low, "high": high})
        positions.append([(x, y) for y in ys])
    lines = [
        {
            "name": f"{ordered[place].run_id}: {format_number(value_of(ordered[place]))}",
            "points": " ".join(f"{x},{y}" for x, y in (axis[number] for axis in positions)),
            "opacity": round(1 - 0.85 * number / len(drawn), 2),
        }
        for number, place in enumerate(drawn)
    ]
    titles = ["run", "state", *names, metric, "at step"]
    is_drawn = len(names) > 1 and len(drawn) > 1
    return TrialTable(titles, rows, axes if is_drawn else [], lines[::-1] if is_drawn else [])


def _scale(name: str, values: Sequence[HparamValue]) -> tuple[list[float], str, str]:
    """Return the heights of values on an axis, and the labels of its ends; text values are in order."""
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if len(numbers) == len(values) and numbers and all(map(math.isfinite, numbers)):
        labels = format_number(min(numbers)), format_number(max(numbers))
        is_rate = _LEARNING_RATE.fullmatch(name) is not None
        if min(numbers) > 0 and (is_rate or max(numbers) / min(numbers) >= _LOG_RATIO):
            numbers = [math.log(number) for number in numbers]
    else:
        texts = sorted({str(value) for value in values})
        numbers = [float(texts.index(str(value))) for value in values]
        labels = (texts[0], texts[-1]) if texts else ("", "")
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    span = (high - low) or 1.0
    top, bottom = 30, _HEIGHT - 30
    return [round(bottom - (bottom - top) * (number - low) / span, 1) for number in numbers], *labels
