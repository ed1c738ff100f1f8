"""Output of a training to its run folder, except checkpoints: events, metrics, trained samples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from hpctrain.buffered_writer import BufferedLineWriter, ReportMessage
from hpctrain.rundir import ATTEMPT_VARIABLE, EventKind, RunDir, event_record
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.loop.step_sync import StepResult
from hpctrain.training.observe.metrics_file import MetricsFile, SamplesFile
from hpctrain.training.observe.step_timer import StepTimer, TimingSample


class RunWriter:
    """Writer for one attempt; only rank 0 writes events and metrics."""

    def __init__(
        self,
        run: RunDir,
        context: DistributedContext,
        environ: Mapping[str, str],
        *,
        log_every: int,
        record_samples: bool,
        print_message: ReportMessage,
        spent: StepTimer,
        last_step: int | None,
    ) -> None:
        """Agree on the number of the attempt. All ranks must call this."""
        rank = context.ranks.rank
        number = environ.get(ATTEMPT_VARIABLE)
        self._attempt: int = context.from_main(
            int(number) if number else (run.new_attempt() if rank == 0 else None)
        )
        self._run, self._log_every, self._spent = run, log_every, spent
        self._events = BufferedLineWriter(run.events, print_message) if rank == 0 else None
        self._metrics = MetricsFile(run, self._attempt, print_message, last_step) if rank == 0 else None
        self._environment = BufferedLineWriter(run.environment, print_message) if rank == 0 else None
        self._samples = (
            SamplesFile(run.samples(self._attempt, rank), print_message) if record_samples else None
        )

    def is_asked_to_requeue(self) -> bool:
        """True if the user requested a requeue: save now, and continue in another attempt."""
        return self._run.is_asked_to_requeue(self._attempt)

    def event(self, kind: EventKind, **fields: Any) -> None:
        """Write an event."""
        if self._events is not None:
            self._events.append(event_record(kind, self._attempt, **fields))

    def environment(self, values: Mapping[str, Any]) -> None:
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
