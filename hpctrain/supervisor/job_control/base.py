"""Interface of the supervisor to the scheduler: Slurm, or a substitute on a laptop.

Each protocol is used by a single part of the supervisor.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from hpctrain.errors import SchedulerError
from hpctrain.records.lease import Lease
from hpctrain.records.successor import JobChanges
from hpctrain.supervisor.policy.job_intent import JobDisposition

log = logging.getLogger(__name__)

#: Slurm's signal before the time limit may come this much early (sbatch(1), --signal).
EARLY_SIGNAL_TOLERANCE_S = 60.0


class JobTime(Protocol):
    """Signals and time limit of the job, for the monitor of an attempt."""

    #: Signals to the supervisor, each with the signal to forward to the ranks; None if the ranks also receive
    #: it.
    on_signal: Mapping[signal.Signals, signal.Signals | None]
    #: Signals from the user, not the scheduler, that end the job.
    cancel_signals: frozenset[signal.Signals]

    @property
    def ends_job_at(self) -> float | None:
        """Monotonic time at which the supervisor must end the job; None if the scheduler ends the job."""

    def seconds_left(self) -> float | None:
        """Return the remaining seconds of the job; None if unlimited or unknown.

        Raises:
            SchedulerError: the scheduler does not respond.
        """


def known_seconds_left(job: JobTime) -> float | None:
    """Return the remaining seconds of the job; None if unlimited or unknown, or without a response."""
    try:
        return job.seconds_left()
    except SchedulerError as error:
        log.warning(
            "cannot determine the remaining time of this job (%s); assuming that enough time remains", error
        )
        return None


class AllocatedNodes(Protocol):
    """Nodes of the job that are separate machines and may fail independently.

    Methods raise SchedulerError if the scheduler refuses or does not answer.
    """

    #: Node of the supervisor, without which the job cannot continue.
    own_host: str

    def lost(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return the nodes of the job that can no longer run processes, with the reason."""

    def draining(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return the nodes that will be taken out of service when this job releases them, with the reason."""

    def shrink_to(self, hosts: Sequence[str]) -> None:
        """Release all other nodes of the job, so that their loss does not end the job."""

    def can_reallocate(self, excluded_hosts: Collection[str]) -> bool:
        """Return true if the site could start the job on other nodes."""

    def num_free(self, excluded_hosts: Collection[str]) -> int:
        """Return the number of additional nodes that are free and not claimed by waiting jobs."""

    def larger_memory(self, hosts: Sequence[str], excluded_hosts: Collection[str]) -> str | None:
        """Return an option of sbatch, such as `mem=96000`, with which the job gets more memory on such nodes.

        None if there is no such option.
        """

    def change_job(self, changes: JobChanges) -> None:
        """Change the requeued job before its next start."""

    def stop_ranks(self) -> None:
        """Send the ranks the signal of a preemption."""

    def kill_steps(self) -> None:
        """End the remaining tasks of a killed supervisor of this job. Waits for a bounded time."""


class SuccessorJobs(Protocol):
    """Successive jobs of a run; only one job at a time holds the lease.

    Methods raise SchedulerError if the scheduler refuses or does not answer.
    """

    #: The predecessor of this job; None if the user submitted this job.
    predecessor: str | None
    #: The lease on the run folder, which the job that trains there holds.
    lease: Lease

    def submit(self, attempt: int, changes: JobChanges) -> str:
        """Submit a job that continues the run after `attempt`; return its id.

        Afterwards, this job must exit.
        """

    def find(self) -> str | None:
        """Return the successor of this job; None if there is none."""

    def is_running(self, job_id: str) -> bool:
        """Return true if the job has started and not yet ended."""

    def submitted_at(self) -> float | None:
        """Return when this job was submitted, in seconds since the epoch; None if unknown."""


class JobControl(JobTime, Protocol):
    """The job of this supervisor."""

    #: Id of the job, as recorded at submission.
    job_id: str

    @property
    def nodes(self) -> AllocatedNodes | None:
        """The nodes of the job; None if all of them are simulated on this machine."""

    @property
    def successors(self) -> SuccessorJobs | None:
        """The other jobs of the run; None if there is no queue, and the run's lock is sufficient."""

    def disposition(self) -> JobDisposition:
        """Return the scheduler's plan for the job."""

    def requeue(self) -> bool:
        """Requeue the job. Return true if this process will be ended, false if the run continues in it.

        Raises:
            SchedulerError: the scheduler refused.
        """

    def can_requeue(self) -> bool:
        """Return true if the site requeues jobs, including this job."""
