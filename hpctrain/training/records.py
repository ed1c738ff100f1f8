"""What a run writes down while it trains: metrics, and which samples were trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.patient import PatientLines, Say
from hpctrain.rundir import RunDir
from hpctrain.training.data.plan import Share
from hpctrain.training.spent import Moment

#: Fields of a line of `metrics.jsonl` that are no metrics.
OWN_FIELDS = ("step", "epoch", "time", "attempt", "spent", "last_step")


class MetricsFile:
    """`metrics.jsonl`: one object a logged step, written by rank 0."""

    def __init__(self, run: RunDir, attempt: int, say: Say, last_step: int | None) -> None:
        self._lines, self._attempt = PatientLines(run.metrics, say), attempt
        # Stands in the first line of an attempt, which may have been told another than the one before.
        self._once = {} if last_step is None else {"last_step": last_step}

    def write(self, steps: Iterable[tuple[int, int, Mapping[str, float], Moment]]) -> None:
        """Write steps: their numbers, epochs, scalars, and when they ended."""
        self._lines.append_all([self._record(*step) for step in steps])

    def _record(
        self, step: int, epoch: int, scalars: Mapping[str, float], ended: Moment
    ) -> Mapping[str, Any]:
        place = {"step": step, "epoch": epoch, "time": ended.time, "attempt": self._attempt}
        record = {**scalars, **place, "spent": ended.spent, **self._once}
        self._once = {}
        return record

    def flush(self) -> None:
        """Write what could not be written before, as far as that works."""
        self._lines.flush()


class SamplesFile:
    """`samples/attempt-000-rank-00000.jsonl`: the indices that a rank trained in each step."""

    def __init__(self, path: Path, say: Say) -> None:
        self._path, self._lines = path, PatientLines(path, say)
        self._make_folder()

    def write(self, share: Share) -> None:
        if len(share.indices):
            self._lines.append({"step": share.step, "epoch": share.epoch, "indices": share.indices.tolist()})

    def flush(self) -> None:
        """Write what could not be written before, as far as that works."""
        if self._lines.trouble is not None:
            self._make_folder()
        self._lines.flush()

    def _make_folder(self) -> None:
        """Where that does not work, the lines wait."""
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
