"""What a run writes down while it trains: metrics, and which samples were trained."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from hpctrain.files import append_json_line, end_torn_line
from hpctrain.rundir import RunDir
from hpctrain.training.data.plan import Share


class MetricsFile:
    """`metrics.jsonl`: one object a logged step, written by rank 0."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._path, self._attempt = run.metrics, attempt
        end_torn_line(self._path)

    def write(self, step: int, epoch: int, scalars: Mapping[str, float]) -> None:
        record = {**scalars, "step": step, "epoch": epoch, "time": time.time(), "attempt": self._attempt}
        append_json_line(self._path, record)


class SamplesFile:
    """`samples/attempt-000-rank-00000.jsonl`: the indices that a rank trained in each step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, share: Share) -> None:
        if len(share.indices):
            append_json_line(
                self._path, {"step": share.step, "epoch": share.epoch, "indices": share.indices.tolist()}
            )
