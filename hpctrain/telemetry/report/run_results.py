"""Read the files of a run for reports, and its results. Each file may be missing, damaged or foreign."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from hpctrain.files import Record, parse_yaml, read_regular
from hpctrain.record_types import (
    CodeRecord,
    Event,
    StepRecord,
    SweepRanking,
    decode,
    read_record,
    read_records,
)
from hpctrain.rundir import RunDir, checkpoint_folder_name, list_checkpoint_steps, rank_steps
from hpctrain.telemetry.hparams import HparamValue, merge_hparams
from hpctrain.telemetry.report.metric_curves import MetricCurves
from hpctrain.text import format_count, format_number

#: Longer diffs are truncated, to keep the report readable.
_MAX_DIFF = 200_000


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection: with millions of live values, it takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_report_records(path: Path, kind: type[Record]) -> list[Record]:
    """Return the records of a file; an unreadable file has none, so that a report can do without it."""
    records: list[Record] = []
    with suppress(OSError):
        records.extend(read_records(path, kind, follow_links=False))
    return records


@dataclass
class CheckpointRecord:
    time: float
    attempt: int
    step: int
    num_bytes: int | None
    seconds: float | None
    stall_s: float | None
    tier: str | None
    kept: bool


def read_checkpoints(run: RunDir, events: Sequence[Event]) -> list[CheckpointRecord]:
    """Return the saves of the `Trainer` and plugins, which have a step."""
    kept_steps = set(list_checkpoint_steps(run.checkpoints))
    return [
        CheckpointRecord(
            *(event.time, event.attempt, event.step, event.num_bytes, event.duration_s, event.stall_s),
            tier=event.tier,
            # Those of plugins have other names.
            kept=event.step in kept_steps or os.path.exists(event.path or ""),
        )
        for event in events
        if event.kind == "checkpoint" and event.step is not None
    ]


def count_saves(checkpoints: Sequence[CheckpointRecord]) -> int:
    """Return the number of saves; a checkpoint of the fast folder is also copied to the run folder."""
    return len({(saved.attempt, saved.step) for saved in checkpoints})


def read_environment(run: RunDir) -> dict[str, Any]:
    """Return the newest recorded value of each field of the environment, over all attempts."""
    environment: dict[str, Any] = {}
    for line in read_report_records(run.environment, dict):
        environment |= line
    # Checksums, for `hpctrain verify`.
    environment.pop("code", None)
    return environment


def read_codes(run: RunDir) -> list[CodeRecord]:
    """Return the code of each submission, if it was copied; a shared report must not follow links."""
    codes = []
    for file in sorted(run.code.glob("submission-*.json")):
        try:
            record = decode(read_regular(file, follow_links=False), CodeRecord)
        except (OSError, ValueError):
            continue
        diff = ""
        with suppress(OSError):
            diff = read_regular(file.with_suffix(".diff"), follow_links=False).decode("utf-8", "replace")
        if len(diff) > _MAX_DIFF:
            diff = f"{diff[:_MAX_DIFF]}\n… truncated; the run folder contains the complete diff"
        codes.append(replace(record, diff=diff))
    return codes


def read_spec(path: Path) -> dict[str, Any]:
    """Return the specification; empty if the file cannot be read."""
    try:
        values = parse_yaml(read_regular(path, follow_links=False).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return {}
    return {str(name): value for name, value in values.items()} if isinstance(values, dict) else {}


Mode = Literal["min", "max"]


@dataclass(frozen=True)
class BestValue:
    metric: str
    mode: Mode
    value: float
    step: int
    checkpoint: str | None
    """Folder of the best kept checkpoint by this metric; None if no kept checkpoint has a value."""
    checkpoint_step: int | None


@dataclass(frozen=True)
class RunResults:
    hparams: dict[str, HparamValue]
    metrics: dict[str, float]
    """Last finite value of each metric."""
    best: BestValue | None


@gc_disabled()
def read_results(
    run: RunDir, metric: str | None = None, mode: Mode | None = None, *, with_metrics: bool = True
) -> RunResults:
    """Read the results of a run. Metrics take seconds for millions of steps.

    Without a metric to optimize, or its direction, those of the sweep apply, then those of `keep_best`, or
    else a validation metric.
    """
    curves = MetricCurves.from_records(read_report_records(run.metrics, StepRecord) if with_metrics else ())
    environment = read_environment(run)
    metrics = {name: value for name in curves.names if (value := curves.last(name)) is not None}
    best = find_best(run.checkpoints, curves, environment, *read_ranking(run, metric, mode))
    return RunResults(merge_hparams(read_spec(run.spec), environment), metrics, best)


def read_ranking(
    run: RunDir, metric: str | None = None, mode: Mode | None = None
) -> tuple[str | None, Mode | None]:
    """Complete a metric and its direction by those that rank the trials of the run's sweep, if any."""
    if run.array is None:
        return metric, mode
    try:
        sweep = _read_sweep_ranking(run.array.sweep, run.array.sweep.stat().st_mtime_ns)
    except (OSError, ValueError):
        return metric, mode
    if sweep.metric is None or metric not in (None, sweep.metric):
        return metric, mode
    return sweep.metric, mode or sweep.mode


@lru_cache(maxsize=8)
def _read_sweep_ranking(path: Path, changed_ns: int) -> SweepRanking:  # noqa: ARG001 (part of the key)
    """Read the ranking once for all trials: the record contains every trial."""
    return read_record(path, SweepRanking)


def common_ranking(best_values: Iterable[BestValue | None]) -> tuple[str | None, Mode | None]:
    """Return metric and direction by which most runs are ranked, preferably not the training loss."""
    counts = Counter((best.metric, best.mode) for best in best_values if best is not None)
    if not counts:
        return None, None
    return max(counts, key=lambda ranking: (ranking[0] != "loss", counts[ranking]))


def rank_key(best: BestValue | None) -> tuple[bool, float]:
    """Return the key that sorts runs with the same metric, best first; runs without a value are last."""
    if best is None:
        return True, 0.0
    return False, -best.value if best.mode == "max" else best.value


def find_best(
    checkpoints: Path,
    curves: MetricCurves,
    environment: Mapping[str, Any],
    metric: str | None = None,
    mode: Mode | None = None,
) -> BestValue | None:
    settings = environment.get("settings")
    monitor, direction = "val_loss", "min"
    if isinstance(settings, Mapping):
        monitor, direction = str(settings.get("monitor", monitor)), str(settings.get("mode", direction))
    if metric is None:
        # The direction of other metrics, such as an accuracy, is unknown.
        names = (name for name in curves.names if name in (monitor, "loss") or name.startswith("val"))
        metric = min(names, key=lambda name: (name != monitor, name == "loss", name), default=None)
    if metric is None:
        return None
    if mode is None:
        mode = "max" if metric == monitor and direction == "max" else "min"
    values = {int(step): value for step, value in curves.points(metric)}
    steps, kept_steps = rank_steps(values, mode), set(list_checkpoint_steps(checkpoints))
    if not steps or (value := values[steps[0]]) is None:
        return None
    kept_step = next((step for step in steps if step in kept_steps), None)
    folder = None if kept_step is None else str(checkpoints / checkpoint_folder_name(kept_step))
    return BestValue(metric, mode, value, steps[0], folder, kept_step)


def describe_best(best: BestValue) -> str:
    """Return the step of the best value, and the best checkpoint unless it is only of the training loss."""
    text = f"at step {format_count(best.step)}"
    if best.checkpoint_step is not None and best.metric != "loss":
        text += f"; best checkpoint: step {format_count(best.checkpoint_step)}"
    return text


def describe_results(results: RunResults) -> dict[str, str]:
    """Return the best value and the hyper-parameters as text, by title."""
    texts = {}
    if (best := results.best) is not None:
        texts["best"] = f"{best.metric} {format_number(best.value)} {describe_best(best)}"
    if results.hparams:
        texts["hparams"] = " ".join(f"{name}={value}" for name, value in results.hparams.items())
    return texts
