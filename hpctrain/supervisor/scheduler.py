"""Whoever gave the job its place, as the supervisor needs it: Slurm, or a stand-in on a laptop."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from hpctrain.jobs.lease import Lease
from hpctrain.supervisor.will import Fate

#: Slurm's signal before the time limit may come so much earlier than asked for (sbatch(1), --signal).
SIGNAL_EARLY_S = 60.0


class Scheduler(Protocol):
    """What the supervisor asks of the scheduler."""

    #: Name of the job, as submission recorded it.
    job_id: str
    #: The job that this one was submitted to continue; None where the user submitted it.
    predecessor: str | None
    #: Signals to the supervisor, and which one the ranks then need; None where they have it already.
    on_signal: Mapping[signal.Signals, signal.Signals | None]
    #: Signals by which the user, and not the scheduler, ends the job.
    cancels: frozenset[signal.Signals]
    #: Whether nodes are machines of their own, so that one may be at fault and another not.
    has_machines: bool

    @property
    def lease(self) -> Lease | None:
        """To be held by whoever trains in the run's folder; None where the run's lock is enough."""

    @property
    def ends_job_at(self) -> float | None:
        """When the supervisor has to end the job, on the monotonic clock; None where the scheduler does."""

    def fate(self) -> Fate:
        """What the scheduler does with the job now."""

    def seconds_left(self) -> float | None:
        """Time until the job's limit; None where there is none, or nobody knows."""

    def requeue(self) -> bool:
        """Put the job back into the queue. True: this process is about to be ended. False: go on here.

        Raises:
            SchedulerError: the scheduler refused.
        """

    def requeues(self) -> bool:
        """Whether the site requeues jobs, and would requeue this one."""

    def others_fit(self, left_out: Collection[str]) -> bool:
        """Whether the site could start the job on other nodes than these."""

    def free_nodes(self, left_out: Collection[str]) -> int:
        """How many nodes the job could have besides its own, because nobody else wants them.

        Raises:
            SchedulerError: the scheduler does not answer.
        """

    def exclude(self, left_out: Collection[str]) -> None:
        """Have the job, which is back in the queue, not start on these nodes.

        Raises:
            SchedulerError: the scheduler refused.
        """

    def hand_on(self, attempt: int, left_out: Collection[str] = ()) -> str:
        """Have a successor job continue the run after `attempt`, and return its id. This job is to end then.

        Args:
            attempt: the start of the ranks that is to be continued.
            left_out: nodes on which it is not to start.

        Raises:
            SchedulerError: the scheduler refused, or does not answer.
        """

    def lost_nodes(self, hosts: Sequence[str]) -> dict[str, str]:
        """Those of the job's nodes on which nothing can run any more, and why.

        Raises:
            SchedulerError: the scheduler does not answer.
        """

    def end_steps(self) -> None:
        """End the tasks that a killed supervisor of this job has left. Waits, for a bounded time."""

    def submitted_at(self) -> float | None:
        """When this job was submitted, in seconds since the epoch; None where nobody knows."""

    def is_running(self, job_id: str) -> bool:
        """Whether another job has begun, and is not gone yet.

        Raises:
            SchedulerError: the scheduler does not answer.
        """

    def keep(self, hosts: Sequence[str]) -> None:
        """Give all other nodes of the job back, so that their loss does not end it.

        Raises:
            SchedulerError: the scheduler refused.
        """

    def find_successor(self) -> str | None:
        """The job that was submitted to continue this one, if there is any.

        Raises:
            SchedulerError: the scheduler does not answer.
        """
