"""Job control without a scheduler, as on a laptop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence

from hpctrain.errors import SchedulerError
from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor.policy.job_intent import JobDisposition


class LocalJobControl:
    """Stand-in for the scheduler: the time limit, preemption by SIGUSR2, the user's SIGTERM."""

    on_signal: Mapping[signal.Signals, signal.Signals | None] = {
        signal.SIGUSR2: signal.SIGTERM,
        signal.SIGTERM: signal.SIGTERM,
        signal.SIGINT: signal.SIGTERM,
    }
    cancels = frozenset({signal.SIGTERM, signal.SIGINT})
    has_machines = False
    predecessor: str | None = None
    lease = None

    def __init__(self, spec: JobSpec) -> None:
        in_array = spec.array_task is not None
        self.job_id = f"{os.getppid()}_{spec.array_task}" if in_array else str(os.getpid())
        self._limit_s = spec.time_limit_s
        self._begun = time.monotonic()

    @property
    def ends_job_at(self) -> float | None:
        """End of the specification's time limit."""
        return None if self._limit_s is None else self._begun + self._limit_s

    def fate(self) -> JobDisposition:
        """Return `STAYS`: only the user ends a job here."""
        return JobDisposition.STAYS

    def seconds_left(self) -> float | None:
        """Return what is left of the specification's limit. See `JobControl.seconds_left`."""
        return None if self.ends_job_at is None else self.ends_job_at - time.monotonic()

    def requeue(self) -> bool:
        """Start the job again at once, in this process, with its full time: the queue is empty."""
        self._begun = time.monotonic()
        return False

    def requeues(self) -> bool:
        """Return True: a requeue is always possible."""
        return True

    def others_fit(self, left_out: Collection[str]) -> bool:  # noqa: ARG002
        """Return False: there is one machine."""
        return False

    def free_nodes(self, left_out: Collection[str]) -> int:  # noqa: ARG002
        """Return 0: there is one machine."""
        return 0

    def exclude(self, left_out: Collection[str]) -> None:
        """Do nothing: there is one machine."""

    def hand_on(self, attempt: int, left_out: Collection[str] = ()) -> str:  # noqa: ARG002
        """Raise: there is no queue in which a successor job could wait. See `JobControl.hand_on`."""
        raise SchedulerError("Successor jobs need Slurm.")

    def lost_nodes(self, hosts: Sequence[str]) -> dict[str, str]:  # noqa: ARG002
        """Return no nodes: simulated ones exist as long as this machine does."""
        return {}

    def end_steps(self) -> None:
        """Do nothing: ranks here end with their supervisor."""

    def submitted_at(self) -> float | None:
        """Return None: the job starts when it is submitted."""
        return None

    def is_running(self, job_id: str) -> bool:  # noqa: ARG002
        """Return False: the run's lock decides, not a queue. See `JobControl.is_running`."""
        return False

    def keep(self, hosts: Sequence[str]) -> None:
        """Do nothing: simulated nodes need no release."""

    def find_successor(self) -> str | None:
        return None
