"""The interface of a backend, and the results of its checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from msgspec import Struct

from hpctrain.errors import SchedulerError
from hpctrain.jobspec.job_spec import BackendName, JobSpec
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import JobRecord, JobStateView

if TYPE_CHECKING:
    from hpctrain.slurm.site_facts import Site, SiteConventions


class SubmissionUnconfirmed(SchedulerError):
    """The scheduler may have accepted the job, so the run folder must not be removed."""


class PreflightResult(Struct, frozen=True):
    """Notes and forecast for a job that passed every check."""

    notes: tuple[str, ...] = ()
    """Notes for the user, one line each."""
    get_forecast: Callable[[], tuple[str, ...]] = tuple
    """Return the expected start and cost; may wait for the scheduler's answer."""
    refusal: Callable[[], str] = str
    """Return the scheduler's reason for a rejection; empty if there is no rejection or no answer."""


class Backend(Protocol):
    """A scheduler. Requests raise SchedulerError if it refuses or is unreachable."""

    name: ClassVar[BackendName]

    def site(self, habits: SiteConventions) -> Site | None:
        """Return the facts about the site; None if there is no site, or it does not respond."""

    def check(self, spec: JobSpec, script: str, habits: SiteConventions) -> PreflightResult:
        """Check a job with this batch script against the available resources. Nothing is changed."""

    def submit(self, spec: JobSpec, run: RunDir, lock: int) -> str:
        """Submit the script of a run folder, whose lock the caller holds, and return the job's id."""

    def query(self, jobs: Sequence[JobRecord]) -> list[JobStateView]:
        """Return the scheduler's view of each job; do not raise if it is unreachable."""

    def cancel(self, jobs: Sequence[JobRecord]) -> None:
        """Ask jobs to end permanently."""

    def requeue(self, jobs: Sequence[JobRecord]) -> None:
        """Ask the ranks of running jobs to save and to continue in a new attempt."""

    def release_hold(self, jobs: Sequence[JobRecord]) -> None:
        """End the scheduler's delay of requeued jobs."""
