"""Lines of `metrics.jsonl`: which of their fields are metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Fields of a line that are no metrics of the training.
NO_METRICS = frozenset(
    {"step", "epoch", "time", "attempt", "spent", "last_step", "model_flops", "peak_flops"}
)


def metrics_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a line by name, those among them that are no finite numbers included."""
    return {
        name: float(value)
        for name, value in record.items()
        if name not in NO_METRICS and (type(value) is float or (type(value) is int and abs(value) < 1e300))
    }
