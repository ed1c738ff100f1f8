"""Write the events, metrics and samples of a training run to its run folder, and print its progress."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hpctrain.cluster import detect
from hpctrain.errors import UserError
from hpctrain.files import make_folder
from hpctrain.record_types import RESERVED_FIELDS, StepRecord
from hpctrain.records.buffered_writer import BufferedLineWriter, ReportMessage
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, EventKind, RunDir, event_record
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.resumed_values import IgnoredValue
from hpctrain.text import format_number
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.observe.step_timers import TimingSample

#: Seconds between two lines.
_LINE_INTERVAL_S = 5.0
#: Minimum interval for a rate, in seconds; shorter intervals are too inaccurate.
_PACE_AFTER_S = 1.0


class Progress:
    """Progress on rank 0; other ranks print nothing."""

    def __init__(self, last_step: int | None, batch_size: int, *, is_main: bool) -> None:
        self._last_step, self._batch_size, self._is_main = last_step, batch_size, is_main
        self._shown_at = 0.0
        self._counted: tuple[float, int] | None = None

    def show(self, step: int, scalars: Mapping[str, float]) -> None:
        shown_at = time.monotonic()
        if self._is_main and (shown_at - self._shown_at >= _LINE_INTERVAL_S or step == self._last_step):
            self._shown_at = shown_at
            total = "" if self._last_step is None else f"/{self._last_step}"
            print(f"step {step}{total}  {format_scalars(scalars)}{self._samples_per_second(shown_at, step)}")

    def print_message(self, text: str) -> None:
        if self._is_main:
            print(text)

    def _samples_per_second(self, counted_at: float, step: int) -> str:
        """Return the rate since the last call; empty initially and for short intervals."""
        before = self._counted
        if before is not None and (counted_at - before[0] < _PACE_AFTER_S or step <= before[1]):
            return ""
        self._counted = counted_at, step
        if before is None:
            return ""
        rate = (step - before[1]) * self._batch_size / (counted_at - before[0])
        return f"  {format_number(rate)} samples/s"


def format_scalars(scalars: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {format_number(value)}" for name, value in scalars.items())


@dataclass(frozen=True)
class StepResult:
    step: int
    epoch: int
    scalars: dict[str, float]
    """Means over the global batch, including `loss`. `num_tokens`, if present, is a sum."""
    timing: TimingSample | None


class RunWriter:
    """Writer of an attempt; only rank 0 writes events and metrics."""

    def __init__(
        self,
        run: RunDir | None,
        context: DistributedContext,
        environ: Mapping[str, str],
        print_message: ReportMessage,
        *,
        log_every: int = 1,
        record_samples: bool = False,
        last_step: int | None = None,
    ) -> None:
        """Collective. Agree on the number of the attempt."""
        self.run, self._attempt, self._log_every = run, 0, log_every
        # Written to the first line of each attempt, because its value may change between attempts.
        self._last_step = last_step
        self._files: dict[str, BufferedLineWriter] = {}
        if run is None:
            return
        rank, number = context.ranks.rank, environ.get(ATTEMPT_VARIABLE)
        self._attempt = context.broadcast_from_main(
            int(number) if number else (run.new_attempt() if rank == 0 else None)
        )
        names = ("events", "metrics", "environment") if rank == 0 else ()
        paths: dict[str, Path] = {name: getattr(run, name) for name in names}
        if record_samples:
            paths["samples"] = run.samples(self._attempt, rank)
        self._files = {name: BufferedLineWriter(path, print_message) for name, path in paths.items()}
        self._folders = {path.parent for path in paths.values()}
        self._make_folders()

    def grace_key(self) -> str | None:
        return None if self.run is None else self.run.grace_key(self._attempt)

    def write_event(self, kind: EventKind, **fields: Any) -> None:
        self._append("events", event_record(kind, self._attempt, **fields))

    def write_resumed(self, step: int, path: Path, seconds: float, broken: Sequence[str] = ()) -> None:
        self.write_event("resumed", step=step, checkpoint=str(path), broken=[*broken], seconds=seconds)

    def write_checkpoint(
        self, step: int, path: Path, num_bytes: int, seconds: float, *, tier: str = "shared", **fields: Any
    ) -> None:
        self.write_event(
            "checkpoint", step=step, path=str(path), tier=tier, bytes=num_bytes, seconds=seconds, **fields
        )

    def write_environment(self, values: Mapping[str, Any]) -> None:
        self._append("environment", {"time": time.time(), "attempt": self._attempt, **values})

    def write_ignored(self, ignored: Sequence[IgnoredValue]) -> None:
        self.write_environment({"ignored": [value.record for value in ignored]})

    def is_logged(self, step: int) -> bool:
        return "metrics" in self._files and step % self._log_every == 0

    def write_steps(self, results: Iterable[StepResult]) -> None:
        records = []
        for result in results if "metrics" in self._files else ():
            if (timing := result.timing) is not None:
                place = result.step, timing.time, self._attempt, result.epoch
                record = StepRecord(*place, timing.spent, last_step=self._last_step, metrics=result.scalars)
                self._last_step = None
                records.append(record.line())
        self._append("metrics", *records)

    def write_samples(self, rank_batch: RankBatch) -> None:
        if "samples" in self._files and len(rank_batch.indices):
            indices = rank_batch.indices.tolist()
            self._append("samples", {"step": rank_batch.step, "epoch": rank_batch.epoch, "indices": indices})

    def flush(self) -> None:
        if any(file.last_error is not None for file in self._files.values()):
            self._make_folders()
        for file in self._files.values():
            file.flush()

    def _append(self, name: str, *records: dict[str, Any]) -> None:
        if records and (file := self._files.get(name)) is not None:
            file.append(*records)

    def _make_folders(self) -> None:
        """Create the folders; if that fails, the lines stay in memory."""
        with suppress(OSError):
            for folder in self._folders:
                make_folder(folder)


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
        writer.write(values, step, epoch, last_step)


class _MetricsWriter:
    def __init__(self, run: RunDir, attempt: int) -> None:
        activity.logs_metrics = True
        self._file, self._attempt = BufferedLineWriter(run.metrics, print), attempt
        self._since = time.perf_counter()

    def write(self, metrics: dict[str, float], step: int, epoch: int, last_step: int | None) -> None:
        written_at = time.perf_counter()
        spent, self._since = {"all": round(written_at - self._since, 6)}, written_at
        place = step, time.time(), self._attempt, epoch, spent
        self._file.append(StepRecord(*place, last_step=last_step, metrics=metrics).line())


@cache
def _writer() -> _MetricsWriter | None:
    folder = os.environ.get(RUN_DIR_VARIABLE)
    if folder is None or not detect(os.environ).is_main:
        return None
    return _MetricsWriter(RunDir(Path(folder)), int(os.environ.get(ATTEMPT_VARIABLE, "0")))
