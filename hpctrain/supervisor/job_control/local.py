"""Job control without a scheduler, as on a laptop."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from hpctrain import system
from hpctrain.rundir import BATCH_PID_VARIABLE
from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor.policy.job_intent import JobDisposition


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
        """End of the specification's time limit."""
        return None if self._limit_s is None else self._started_at + self._limit_s

    def seconds_left(self) -> float | None:
        """Return the remaining time until the limit in the specification. See `JobTime.seconds_left`."""
        return None if self.ends_job_at is None else self.ends_job_at - system.monotonic()

    def disposition(self) -> JobDisposition:
        """Return `STAYS`: only the user ends a local job."""
        return JobDisposition.STAYS

    def requeue(self) -> bool:
        """Restart the job immediately in this process, with the full time limit: there is no queue."""
        self._started_at = system.monotonic()
        return False

    def can_requeue(self) -> bool:
        """Return True: a requeue is always possible."""
        return True
