"""A job without a scheduler: what the supervisor does itself on a laptop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence

from hpctrain.errors import SchedulerError
from hpctrain.jobs.spec import JobSpec
from hpctrain.supervisor.will import Fate


class LocalJob:
    """A laptop's stand-in for the scheduler: the time limit, preemption by SIGUSR2, the user's SIGTERM."""

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
        """The end of the specification's time limit."""
        return None if self._limit_s is None else self._begun + self._limit_s

    def fate(self) -> Fate:
        """Nobody but the user ends a job here."""
        return Fate.STAYS

    def seconds_left(self) -> float | None:
        """What is left of the specification's limit. See `Scheduler.seconds_left`."""
        return None if self.ends_job_at is None else self.ends_job_at - time.monotonic()

    def requeue(self) -> bool:
        """The queue is empty, so the job starts again at once, in this process, with all its time."""
        self._begun = time.monotonic()
        return False

    def requeues(self) -> bool:
        """A place in the queue is to be had for the asking."""
        return True

    def others_fit(self, left_out: Collection[str]) -> bool:  # noqa: ARG002
        """There is one machine."""
        return False

    def free_nodes(self, left_out: Collection[str]) -> int:  # noqa: ARG002
        """There is one machine."""
        return 0

    def exclude(self, left_out: Collection[str]) -> None:
        """There is one machine."""

    def hand_on(self, attempt: int, left_out: Collection[str] = ()) -> str:  # noqa: ARG002
        """There is no queue in which another job could wait. See `Scheduler.hand_on`."""
        raise SchedulerError("There are no successor jobs without Slurm.")

    def lost_nodes(self, hosts: Sequence[str]) -> dict[str, str]:  # noqa: ARG002
        """Pretend nodes are there as long as this machine is."""
        return {}

    def end_steps(self) -> None:
        """Ranks here end with their supervisor."""

    def submitted_at(self) -> float | None:
        """It began then."""
        return None

    def is_running(self, job_id: str) -> bool:  # noqa: ARG002
        """The run's lock tells, and no queue. See `Scheduler.is_running`."""
        return False

    def keep(self, hosts: Sequence[str]) -> None:
        """Nobody takes notice of pretend nodes."""

    def find_successor(self) -> str | None:
        return None
