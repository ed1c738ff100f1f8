"""Files that a run writes during training: metrics and trained samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.buffered_writer import BufferedLineWriter, ReportMessage
from hpctrain.files import make_folder
from hpctrain.rundir import RunDir
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.observe.step_timer import TimingSample

#: Fields of a line of `metrics.jsonl` that are not metrics.
RESERVED_FIELDS = ("step", "epoch", "time", "attempt", "spent", "last_step")


class MetricsFile:
    """Writer of `metrics.jsonl`: one object per logged step, on rank 0."""

    def __init__(
        self, run: RunDir, attempt: int, print_message: ReportMessage, last_step: int | None
    ) -> None:
        self._lines, self._attempt = BufferedLineWriter(run.metrics, print_message), attempt
        # Written to the first line of each attempt, because its value may change between attempts.
        self._once = {} if last_step is None else {"last_step": last_step}

    def write(self, steps: Iterable[tuple[int, int, Mapping[str, float], TimingSample]]) -> None:
        """Write steps: number, epoch, scalars, and end time."""
        self._lines.append_all([self._record(*step) for step in steps])

    def _record(
        self, step: int, epoch: int, scalars: Mapping[str, float], ended: TimingSample
    ) -> Mapping[str, Any]:
        place = {"step": step, "epoch": epoch, "time": ended.time, "attempt": self._attempt}
        record = {**scalars, **place, "spent": ended.spent, **self._once}
        self._once = {}
        return record

    def flush(self) -> None:
        """Retry earlier failed writes."""
        self._lines.flush()


class SamplesFile:
    """Writer of `samples/attempt-000-rank-00000.jsonl`: the sample indices of each step of a rank."""

    def __init__(self, path: Path, print_message: ReportMessage) -> None:
        self._path, self._lines = path, BufferedLineWriter(path, print_message)
        self._make_folder()

    def write(self, share: RankBatch) -> None:
        if len(share.indices):
            self._lines.append({"step": share.step, "epoch": share.epoch, "indices": share.indices.tolist()})

    def flush(self) -> None:
        """Retry earlier failed writes."""
        if self._lines.trouble is not None:
            self._make_folder()
        self._lines.flush()

    def _make_folder(self) -> None:
        """Create the folder; if that fails, the lines stay in memory."""
        with suppress(OSError):
            make_folder(self._path.parent)
