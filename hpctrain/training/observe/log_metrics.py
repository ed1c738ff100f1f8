"""Metrics of your own training loop, for `status`, `top` and the report."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hpctrain.buffered_writer import BufferedLineWriter
from hpctrain.cluster import detect
from hpctrain.errors import UserError
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from hpctrain.runtime.rank_activity import activity
from hpctrain.telemetry.accounting.metric_fields import RESERVED_FIELDS


def log_metrics(
    metrics: Mapping[str, torch.Tensor | float], step: int, *, epoch: int = 0, last_step: int | None = None
) -> None:
    """Write the metrics of a step to the run's `metrics.jsonl`.

    Only rank 0 writes, and only its own values. Does nothing on other ranks or without a run folder.
    Reading a tensor waits for its GPU, so log only every few steps.

    Args:
        metrics: scalars by name, such as `loss`.
        step: number of completed optimizer steps.
        epoch: epoch of the step.
        last_step: the step at which training ends, from which the remaining time is estimated.

    Raises:
        UserError: a name is reserved.
    """
    if reserved := sorted(metrics.keys() & RESERVED_FIELDS):
        raise UserError(f"log_metrics() sets {reserved[0]!r} itself. Use another name for the metric.")
    writer = _writer()
    if writer is not None:
        values = {
            name: float(value.detach() if isinstance(value, torch.Tensor) else value)
            for name, value in metrics.items()
        }
        writer.write(values, step, {"epoch": epoch} | ({} if last_step is None else {"last_step": last_step}))


class _MetricsWriter:
    def __init__(self, run: RunDir, attempt: int) -> None:
        activity.logs_metrics = True
        self._file, self._attempt = BufferedLineWriter(run.metrics, print), attempt
        self._since = time.perf_counter()

    def write(self, values: Mapping[str, float], step: int, more: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        spent, self._since = {"all": round(now - self._since, 6)}, now
        place = {"step": step, "time": time.time(), "attempt": self._attempt, "spent": spent}
        self._file.append({**values, **place, **more})


@cache
def _writer() -> _MetricsWriter | None:
    folder = os.environ.get(RUN_DIR_VARIABLE)
    if folder is None or not detect(os.environ).is_main:
        return None
    return _MetricsWriter(RunDir(Path(folder)), int(os.environ.get(ATTEMPT_VARIABLE, "0")))
