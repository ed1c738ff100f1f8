"""The scheduler as the supervisor sees it: Slurm, or a stand-in on a laptop.

Each protocol is what one part of the supervisor needs.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from hpctrain.errors import SchedulerError
from hpctrain.records.lease import Lease
from hpctrain.supervisor.policy.job_intent import JobDisposition

log = logging.getLogger(__name__)

#: Slurm's signal before the time limit may come this much early (sbatch(1), --signal).
EARLY_SIGNAL_TOLERANCE_S = 60.0


class JobTime(Protocol):
    """Signals and time limit of the job, for the monitor of an attempt."""

    #: Signals to the supervisor, each with the one to forward to the ranks; None if they already have it.
    on_signal: Mapping[signal.Signals, signal.Signals | None]
    #: Signals with which the user, not the scheduler, ends the job.
    cancel_signals: frozenset[signal.Signals]

    @property
    def ends_job_at(self) -> float | None:
        """When the supervisor must end the job, on the monotonic clock; None if the scheduler does."""

    def seconds_left(self) -> float | None:
        """Return the seconds until the job's limit; None if unlimited or unknown.

        Raises:
            SchedulerError: the scheduler does not answer.
        """


def known_seconds_left(job: JobTime) -> float | None:
    """Return the seconds until the job's limit; None if unlimited, unknown, or the scheduler is silent."""
    try:
        return job.seconds_left()
    except SchedulerError as error:
        log.warning("%s Assuming that there is enough time.", error)
        return None


class AllocatedNodes(Protocol):
    """Nodes of the job that are separate machines, so that one may fail without the others.

    Methods raise SchedulerError if the scheduler refuses or does not answer.
    """

    def lost(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return the job's nodes that can no longer run anything, with the reason."""

    def shrink_to(self, hosts: Sequence[str]) -> None:
        """Release all other nodes of the job, so that their loss does not end it."""

    def can_reallocate(self, left_out: Collection[str]) -> bool:
        """True if the site could start the job on nodes other than these."""

    def num_free(self, left_out: Collection[str]) -> int:
        """Return how many additional nodes the job could get that no other job is waiting for."""

    def exclude(self, left_out: Collection[str]) -> None:
        """Exclude these nodes from the next start of the job, which is back in the queue."""

    def stop_ranks(self) -> None:
        """Send the ranks the signal of a preemption."""

    def kill_steps(self) -> None:
        """End the tasks left by a killed supervisor of this job. Waits, for a bounded time."""


class SuccessorJobs(Protocol):
    """Jobs that continue a run one after the other; one of them at a time holds the lease.

    Methods raise SchedulerError if the scheduler refuses or does not answer.
    """

    #: The job that this one was submitted to continue; None if the user submitted it.
    predecessor: str | None
    #: Held by the job that trains in the run folder.
    lease: Lease

    def submit(self, attempt: int, left_out: Collection[str] = ()) -> str:
        """Submit a job that continues the run after `attempt`, not on these nodes; return its id.

        This job must then end.
        """

    def find(self) -> str | None:
        """Return the job that was submitted to continue this one; None without one."""

    def is_running(self, job_id: str) -> bool:
        """True if another job has started and not yet ended."""

    def submitted_at(self) -> float | None:
        """Return when this job was submitted, in seconds since the epoch; None if unknown."""


class JobControl(JobTime, Protocol):
    """The job of this supervisor."""

    #: Id of the job, as recorded at submission.
    job_id: str

    @property
    def nodes(self) -> AllocatedNodes | None:
        """The nodes of the job; None if they all are this machine."""

    @property
    def successors(self) -> SuccessorJobs | None:
        """The other jobs of the run; None if there is no queue, and the run's lock is sufficient."""

    def disposition(self) -> JobDisposition:
        """Return what the scheduler is doing with the job."""

    def requeue(self) -> bool:
        """Put the job back into the queue. True: this process is about to be ended. False: continue here.

        Raises:
            SchedulerError: the scheduler refused.
        """

    def can_requeue(self) -> bool:
        """True if the site requeues jobs, and would requeue this one."""
