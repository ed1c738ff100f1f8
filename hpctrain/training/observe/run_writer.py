"""Output of a training to its run folder, except checkpoints: events, metrics, trained samples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.buffered_writer import BufferedLineWriter, ReportMessage
from hpctrain.files import make_folder
from hpctrain.rundir import ATTEMPT_VARIABLE, EventKind, RunDir, event_record
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.observe.step_timer import StepTimer, TimingSample


@dataclass(frozen=True)
class StepResult:
    """Result of one step, summed over all ranks; the same on every rank except for `ended`."""

    step: int
    epoch: int
    scalars: dict[str, float]
    """Means over the global batch, including `loss`. `num_tokens`, if present, is a sum."""
    ended: TimingSample | None
    """Time sample of the step, if this rank logs it."""


class MetricsFile:
    """Writer of `metrics.jsonl`: one object per logged step, on rank 0."""

    def __init__(self, run: RunDir, attempt: int, say: ReportMessage, last_step: int | None) -> None:
        self._lines, self._attempt = BufferedLineWriter(run.metrics, say), attempt
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

    def __init__(self, path: Path, say: ReportMessage) -> None:
        self._path, self._lines = path, BufferedLineWriter(path, say)
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


class RunWriter:
    """Writer for one attempt; only rank 0 writes events and metrics."""

    def __init__(
        self,
        run: RunDir,
        team: DistributedContext,
        environ: Mapping[str, str],
        *,
        log_every: int,
        record_samples: bool,
        say: ReportMessage,
        spent: StepTimer,
        last_step: int | None,
    ) -> None:
        """Agree on the number of the attempt. All ranks must call this."""
        rank = team.ranks.rank
        number = environ.get(ATTEMPT_VARIABLE)
        self._attempt: int = team.from_main(
            int(number) if number else (run.new_attempt() if rank == 0 else None)
        )
        self._run, self._log_every, self._spent = run, log_every, spent
        self._events = BufferedLineWriter(run.events, say) if rank == 0 else None
        self._metrics = MetricsFile(run, self._attempt, say, last_step) if rank == 0 else None
        self._environment = BufferedLineWriter(run.environment, say) if rank == 0 else None
        self._samples = SamplesFile(run.samples(self._attempt, rank), say) if record_samples else None

    def is_asked_to_requeue(self) -> bool:
        """True if the user requested a requeue: save now, and continue in another attempt."""
        return self._run.is_asked_to_requeue(self._attempt)

    def event(self, kind: EventKind, **fields: Any) -> None:
        """Write an event."""
        if self._events is not None:
            self._events.append(event_record(kind, self._attempt, **fields))

    def surroundings(self, values: Mapping[str, Any]) -> None:
        """Write the environment of this attempt."""
        if self._environment is not None:
            self._environment.append({"time": time.time(), "attempt": self._attempt, **values})

    def ended(self, step: int) -> TimingSample | None:
        """Return the time sample of a trained step, if this rank logs that step."""
        return self._spent.now() if self._metrics is not None and step % self._log_every == 0 else None

    def steps(self, results: Iterable[StepResult]) -> None:
        """Log the results that have a time sample."""
        if self._metrics is not None:
            self._metrics.write(
                (each.step, each.epoch, each.scalars, each.ended)
                for each in results
                if each.ended is not None
            )

    def step(self, step: int, epoch: int, scalars: Mapping[str, float]) -> None:
        """Log a step that ends now, whatever its number."""
        if self._metrics is not None:
            self._metrics.write([(step, epoch, scalars, self._spent.now())])

    def share(self, share: RankBatch) -> None:
        """Write the sample indices of this rank's step, if `record_samples` is set."""
        if self._samples is not None:
            self._samples.write(share)

    def flush(self) -> None:
        """Retry earlier failed writes."""
        for file in (self._events, self._metrics, self._environment, self._samples):
            if file is not None:
                file.flush()
