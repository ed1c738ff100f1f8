"""What a training writes into its run folder besides checkpoints: events, metrics, trained samples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from hpctrain.patient import PatientLines, Say
from hpctrain.rundir import ATTEMPT_VARIABLE, EventKind, RunDir, event_record
from hpctrain.runtime.process_group import Team
from hpctrain.training.data.plan import Share
from hpctrain.training.records import MetricsFile, SamplesFile
from hpctrain.training.report import StepResult
from hpctrain.training.spent import Moment, Spent


class RunLog:
    """Writes down what happens in one attempt; events and metrics are rank 0's to write."""

    def __init__(
        self,
        run: RunDir,
        team: Team,
        environ: Mapping[str, str],
        *,
        log_every: int,
        record_samples: bool,
        say: Say,
        spent: Spent,
        last_step: int | None,
    ) -> None:
        """Agree on the number of the attempt. All ranks must call this."""
        rank = team.ranks.rank
        number = environ.get(ATTEMPT_VARIABLE)
        self._attempt: int = team.from_main(
            int(number) if number else (run.new_attempt() if rank == 0 else None)
        )
        self._run, self._log_every, self._spent = run, log_every, spent
        self._events = PatientLines(run.events, say) if rank == 0 else None
        self._metrics = MetricsFile(run, self._attempt, say, last_step) if rank == 0 else None
        self._environment = PatientLines(run.environment, say) if rank == 0 else None
        self._samples = SamplesFile(run.samples(self._attempt, rank), say) if record_samples else None

    def is_asked_to_requeue(self) -> bool:
        """Whether the user asked this attempt to save, for another to go on."""
        return self._run.is_asked_to_requeue(self._attempt)

    def event(self, kind: EventKind, **fields: Any) -> None:
        """Write an event."""
        if self._events is not None:
            self._events.append(event_record(kind, self._attempt, **fields))

    def surroundings(self, values: Mapping[str, Any]) -> None:
        """Write down what this start of the ranks runs on."""
        if self._environment is not None:
            self._environment.append({"time": time.time(), "attempt": self._attempt, **values})

    def ended(self, step: int) -> Moment | None:
        """A step is trained: when, if its number says that this rank is to log it."""
        return self._spent.now() if self._metrics is not None and step % self._log_every == 0 else None

    def steps(self, results: Iterable[StepResult]) -> None:
        """Log those of them that are to be logged."""
        if self._metrics is not None:
            self._metrics.write(
                (each.step, each.epoch, each.scalars, each.ended)
                for each in results
                if each.ended is not None
            )

    def step(self, step: int, epoch: int, scalars: Mapping[str, float]) -> None:
        """Log a step, whatever its number; it ends now."""
        if self._metrics is not None:
            self._metrics.write([(step, epoch, scalars, self._spent.now())])

    def share(self, share: Share) -> None:
        """Write down which samples this rank trains in a step, where that was asked for."""
        if self._samples is not None:
            self._samples.write(share)

    def flush(self) -> None:
        """Write what could not be written before, as far as that works."""
        for file in (self._events, self._metrics, self._environment, self._samples):
            if file is not None:
                file.flush()
