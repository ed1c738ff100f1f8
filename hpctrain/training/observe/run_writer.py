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
from hpctrain.training.observe.step_timer import TimingSample


class RunWriter:
    """Writer of one attempt; only rank 0 writes events and metrics. Without a run folder it writes nothing.

    Attributes:
        run: the run folder, or None.
    """

    def __init__(
        self,
        run: RunDir | None,
        context: DistributedContext,
        environ: Mapping[str, str],
        print_message: ReportMessage,
        *,
        log_every: int,
        record_samples: bool,
        last_step: int | None,
    ) -> None:
        """Agree on the number of the attempt. All ranks must call this."""
        self.run, self._attempt, self._log_every = run, 0, log_every
        self._events = self._metrics = self._environment = self._samples = None
        if run is None:
            return
        rank, number = context.ranks.rank, environ.get(ATTEMPT_VARIABLE)
        self._attempt = context.from_main(
            int(number) if number else (run.new_attempt() if rank == 0 else None)
        )
        if rank == 0:
            self._events = BufferedLineWriter(run.events, print_message)
            self._metrics = MetricsFile(run, self._attempt, print_message, last_step)
            self._environment = BufferedLineWriter(run.environment, print_message)
        if record_samples:
            self._samples = SamplesFile(run.samples(self._attempt, rank), print_message)

    def is_asked_to_requeue(self) -> bool:
        """True if the user requested a requeue: save now, and continue in another attempt."""
        return self.run is not None and self.run.is_asked_to_requeue(self._attempt)

    def write_event(self, kind: EventKind, **fields: Any) -> None:
        """Write an event."""
        if self._events is not None:
            self._events.append(event_record(kind, self._attempt, **fields))

    def write_environment(self, values: Mapping[str, Any]) -> None:
        """Write the environment of this attempt."""
        if self._environment is not None:
            self._environment.append({"time": time.time(), "attempt": self._attempt, **values})

    def is_logged(self, step: int) -> bool:
        """True if this rank logs `step`."""
        return self._metrics is not None and step % self._log_every == 0

    def write_steps(self, results: Iterable[StepResult]) -> None:
        """Log the results that have a time sample."""
        if self._metrics is not None:
            self._metrics.write(
                (each.step, each.epoch, each.scalars, each.ended)
                for each in results
                if each.ended is not None
            )

    def write_step(self, step: int, epoch: int, scalars: Mapping[str, float], ended: TimingSample) -> None:
        """Log a step, whatever its number."""
        if self._metrics is not None:
            self._metrics.write([(step, epoch, scalars, ended)])

    def write_samples(self, share: RankBatch) -> None:
        """Write the sample indices of this rank's step, if they are recorded."""
        if self._samples is not None:
            self._samples.write(share)

    def flush(self) -> None:
        """Retry earlier failed writes."""
        for file in (self._events, self._metrics, self._environment, self._samples):
            if file is not None:
                file.flush()
