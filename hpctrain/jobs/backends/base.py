"""The interface of a backend, and the results of its checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from hpctrain.errors import SchedulerError
from hpctrain.rundir import RunDir
from hpctrain.spec.job_spec import BackendName, JobSpec

if TYPE_CHECKING:
    from hpctrain.records.run_record import JobRecord
    from hpctrain.slurm.site_facts import Site
    from hpctrain.slurm.states import JobStateView


class SubmissionUnconfirmed(SchedulerError):
    """The scheduler may or may not have accepted the job, so the run folder has to stay."""


@dataclass(frozen=True)
class PreflightResult:
    """Findings about a job that passed every check."""

    notes: tuple[str, ...] = ()
    """Notes for the user, one line each."""
    get_forecast: Callable[[], tuple[str, ...]] = tuple
    """Return the expected start and cost; may wait for the scheduler's answer."""
    refusal: Callable[[], str] = str
    """Return the scheduler's reason for refusing the job; empty if it would accept it or gives no answer."""


class Backend(Protocol):
    """One way to run jobs. Job ids have the backend's own format."""

    name: ClassVar[BackendName]

    def check(self, spec: JobSpec, script: str, profile: Site) -> PreflightResult:
        """Check the request against what exists. Nothing is changed.

        Args:
            spec: the job as requested.
            script: the batch script, as it would be submitted.
            profile: facts about the site from option files.

        Raises:
            SpecError: the job cannot run as requested.
        """

    def submit(self, spec: JobSpec, run: RunDir, lock: int) -> str:
        """Submit the run's job script and return the job's id.

        Args:
            spec: the job as requested.
            run: the run folder, already written.
            lock: file descriptor of the run's lock, held by the caller.

        Raises:
            SubmissionUnconfirmed: the scheduler did not answer, and may have accepted the job.
            SchedulerError: the scheduler refused or cannot be reached.
        """

    def query(self, jobs: Sequence[JobRecord]) -> list[JobStateView]:
        """Return the scheduler's view of each job; do not raise if it is unreachable."""

    def cancel(self, jobs: Sequence[JobRecord]) -> None:
        """Ask jobs to end for good.

        Raises:
            SchedulerError: the scheduler refused or cannot be reached.
        """

    def requeue(self, jobs: Sequence[JobRecord]) -> None:
        """Ask the ranks of running jobs to save and to continue in a new attempt.

        Raises:
            SchedulerError: the scheduler refused or cannot be reached.
        """

    def release_hold(self, jobs: Sequence[JobRecord]) -> None:
        """End the scheduler's delay of requeued jobs.

        Raises:
            SchedulerError: the scheduler refused or cannot be reached.
        """
