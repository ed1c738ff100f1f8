"""Read the results of a run: hyper-parameters, last metrics, and the best value with its checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from hpctrain.files import read_json
from hpctrain.rundir import RunDir, checkpoint_folder_name, list_checkpoint_steps, rank_steps
from hpctrain.schema import StepRecord
from hpctrain.telemetry.hparams import HparamValue, merge_hparams
from hpctrain.telemetry.report.artifacts import gc_disabled, read_environment, read_report_records, read_spec
from hpctrain.telemetry.report.metric_curves import MetricCurves
from hpctrain.text import format_count, format_number

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
    """Read the results of a run; missing or damaged files are skipped.

    Args:
        run: the run.
        metric: the metric to optimize; None selects that of the run's sweep, then the metric of `keep_best`,
            or else a validation metric.
        mode: direction of the metric; None selects that of the sweep, then that of `keep_best`, or `min`.
        with_metrics: read the metrics, which takes seconds for millions of steps.
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
        sweep_metric, sweep_mode = _sweep_ranking(run.array.sweep, run.array.sweep.stat().st_mtime_ns)
    except (OSError, ValueError):
        return metric, mode
    if not isinstance(sweep_metric, str) or metric not in (None, sweep_metric):
        return metric, mode
    return sweep_metric, mode or (sweep_mode if sweep_mode in get_args(Mode) else None)


@lru_cache(maxsize=8)
def _sweep_ranking(path: Path, changed_ns: int) -> tuple[Any, Any]:  # noqa: ARG001 (part of the key)
    """Read the metric and its direction once for all trials: the record contains every trial."""
    record = read_json(path)
    return record.get("metric"), record.get("mode")


def common_ranking(best_values: Iterable[BestValue | None]) -> tuple[str | None, Mode | None]:
    """Return the metric by which most of the runs are ranked, and its direction.

    Runs that have logged no other metric than the training loss do not count, unless there are no others.
    """
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
        # Of other metrics, those of the validation are first, and the loss is last.
        names = sorted(
            curves.names, key=lambda name: (name != monitor, not name.startswith("val"), name == "loss")
        )
        metric = next(iter(names), None)
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
