"""Interface between the supervisor and its scheduler: Slurm, or a stand-in on a laptop."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from hpctrain.records.lease import Lease
from hpctrain.supervisor.policy.job_intent import JobDisposition

#: Slurm's signal before the time limit may come this much early (sbatch(1), --signal).
EARLY_SIGNAL_TOLERANCE_S = 60.0


class JobControl(Protocol):
    """The supervisor's view of the scheduler."""

    #: Id of the job, as recorded at submission.
    job_id: str
    #: The job that this one was submitted to continue; None if the user submitted it.
    predecessor: str | None
    #: Signals to the supervisor, each with the one to forward to the ranks; None if they already have it.
    on_signal: Mapping[signal.Signals, signal.Signals | None]
    #: Signals with which the user, not the scheduler, ends the job.
    cancels: frozenset[signal.Signals]
    #: True if nodes are separate machines, so that one may fail without the others.
    has_machines: bool

    @property
    def lease(self) -> Lease | None:
        """Lease held by the job that trains in the run folder; None if the run's lock is sufficient."""

    @property
    def ends_job_at(self) -> float | None:
        """When the supervisor must end the job, on the monotonic clock; None if the scheduler does."""

    def fate(self) -> JobDisposition:
        """Return what the scheduler is doing with the job."""

    def seconds_left(self) -> float | None:
        """Return the seconds until the job's limit; None if unlimited or unknown."""

    def requeue(self) -> bool:
        """Put the job back into the queue. True: this process is about to be ended. False: continue here.

        Raises:
            SchedulerError: the scheduler refused.
        """

    def requeues(self) -> bool:
        """True if the site requeues jobs, and would requeue this one."""

    def others_fit(self, left_out: Collection[str]) -> bool:
        """True if the site could start the job on nodes other than these."""

    def free_nodes(self, left_out: Collection[str]) -> int:
        """Return how many additional nodes the job could get that no other job is waiting for.

        Raises:
            SchedulerError: the scheduler does not answer.
        """

    def exclude(self, left_out: Collection[str]) -> None:
        """Exclude these nodes from the next start of the job, which is back in the queue.

        Raises:
            SchedulerError: the scheduler refused.
        """

    def hand_on(self, attempt: int, left_out: Collection[str] = ()) -> str:
        """Submit a successor job that continues the run after `attempt`, and return its id.

        This job must then end.

        Args:
            attempt: the attempt to continue.
            left_out: nodes on which it must not start.

        Raises:
            SchedulerError: the scheduler refused, or does not answer.
        """

    def lost_nodes(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return the job's nodes that can no longer run anything, with the reason.

        Raises:
            SchedulerError: the scheduler does not answer.
        """

    def end_steps(self) -> None:
        """End the tasks left by a killed supervisor of this job. Waits, for a bounded time."""

    def submitted_at(self) -> float | None:
        """Return when this job was submitted, in seconds since the epoch; None if unknown."""

    def is_running(self, job_id: str) -> bool:
        """True if another job has started and not yet ended.

        Raises:
            SchedulerError: the scheduler does not answer.
        """

    def keep(self, hosts: Sequence[str]) -> None:
        """Release all other nodes of the job, so that their loss does not end it.

        Raises:
            SchedulerError: the scheduler refused.
        """

    def find_successor(self) -> str | None:
        """Return the job that was submitted to continue this one; None without one.

        Raises:
            SchedulerError: the scheduler does not answer.
        """
