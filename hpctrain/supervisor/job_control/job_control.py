"""Control the job of the supervisor: in Slurm, or without a scheduler, as on a laptop."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping

from hpctrain import system
from hpctrain.errors import SchedulerError
from hpctrain.rundir import BATCH_PID_VARIABLE
from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor.job_control.slurm import SlurmJobControl
from hpctrain.supervisor.policy.job_intent import JobDisposition

log = logging.getLogger(__name__)

#: Slurm's signal before the time limit may come this much early (sbatch(1), --signal).
EARLY_SIGNAL_TOLERANCE_S = 60.0


class LocalJobControl:
    """Substitute for the scheduler: the time limit, preemption by SIGUSR2, the user's SIGTERM."""

    on_signal: Mapping[signal.Signals, signal.Signals | None] = {
        signal.SIGUSR2: signal.SIGTERM,
        signal.SIGTERM: signal.SIGTERM,
        signal.SIGINT: signal.SIGTERM,
    }
    cancel_signals = frozenset({signal.SIGTERM, signal.SIGINT})
    nodes = successors = None

    def __init__(self, spec: JobSpec, environ: Mapping[str, str]) -> None:
        batch_pid, index = environ.get(BATCH_PID_VARIABLE), spec.array_task
        self.job_id = (
            batch_pid or str(system.getpid()) if index is None else f"{batch_pid or os.getppid()}_{index}"
        )
        self._limit_s = spec.time_limit_s
        self._started_at = system.monotonic()

    @property
    def ends_job_at(self) -> float | None:
        return None if self._limit_s is None else self._started_at + self._limit_s

    def seconds_left(self) -> float | None:
        return None if self.ends_job_at is None else self.ends_job_at - system.monotonic()

    def disposition(self) -> JobDisposition:
        return JobDisposition.STAYS  # Only the user ends a local job.

    def requeue(self) -> bool:
        """Restart the job immediately in this process, with the full time limit: there is no queue."""
        self._started_at = system.monotonic()
        return False

    def can_requeue(self) -> bool:
        return True


JobControl = LocalJobControl | SlurmJobControl


def known_seconds_left(job: JobControl) -> float | None:
    """Return the remaining seconds of the job; None if unlimited or unknown, or without a response."""
    try:
        return job.seconds_left()
    except SchedulerError as error:
        log.warning(
            "cannot determine the remaining time of this job (%s); assuming that enough time remains", error
        )
        return None
