"""Fields of the lines in `metrics.jsonl`, and detection of metrics."""

from __future__ import annotations

from hpctrain.rundir import RunDir
from hpctrain.schema import StepRecord
from hpctrain.text import format_count

#: Metrics that are not shown as curves. FLOPs are logged only for the model FLOPs utilization.
NOT_CURVES = frozenset({"model_flops", "peak_flops"})

#: Placeholder for a figure derived from steps, for runs without reported steps.
NO_STEPS = "the script reports no steps"
NO_STEPS_YET = "no steps have been reported"


def reports_steps(run: RunDir, *, has_steps: bool, completed: bool) -> bool | None:
    """Return true if the script of a run reports its steps; None if the first step may be pending.

    Args:
        run: the run. The `Trainer` writes its environment before the first step.
        has_steps: metrics of at least one step exist.
        completed: the script has completed.
    """
    if has_steps or run.environment.is_file():
        return True
    return False if completed else None


def why_unknown(reports: bool | None) -> str:
    return NO_STEPS if reports is False else NO_STEPS_YET


def describe_step(step: int | None, reports: bool | None) -> str:
    """Return the last step as a string for the user."""
    if step is not None:
        return format_count(step)
    return "none so far" if reports else f"unknown: {why_unknown(reports)}"


def metric_values(record: StepRecord) -> dict[str, float]:
    """Return the metrics of a line by name, including infinite and NaN values."""
    return {
        name: float(value)
        for name, value in record.metrics.items()
        if name not in NOT_CURVES and (type(value) is float or (type(value) is int and abs(value) < 1e300))
    }
