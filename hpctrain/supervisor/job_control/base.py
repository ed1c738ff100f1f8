"""Interface of the supervisor to the scheduler: Slurm, or a substitute on a laptop."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from typing import Protocol

from hpctrain.errors import SchedulerError
from hpctrain.supervisor.job_control.slurm_nodes import SlurmNodes
from hpctrain.supervisor.job_control.slurm_successors import SlurmSuccessors
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


class JobControl(JobTime, Protocol):
    """The job of this supervisor."""

    #: Id of the job, as recorded at submission.
    job_id: str

    @property
    def nodes(self) -> SlurmNodes | None:
        """The nodes of the job; None if all of them are simulated on this machine."""

    @property
    def successors(self) -> SlurmSuccessors | None:
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
