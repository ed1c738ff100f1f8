"""Backends that run jobs, and the choice of one for a submission."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

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
    foretell: Callable[[], tuple[str, ...]] = tuple
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

    def look(self, jobs: Sequence[JobRecord]) -> list[JobStateView]:
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

    def lift_hold(self, jobs: Sequence[JobRecord]) -> None:
        """End the scheduler's delay of requeued jobs.

        Raises:
            SchedulerError: the scheduler refused or cannot be reached.
        """


def open_backend(name: BackendName, environ: Mapping[str, str]) -> Backend:
    """Return the backend of that name; `environ` is the environment of its commands."""
    # Imported only when needed: a dry run has to be quick.
    if name == "slurm":
        from hpctrain.jobs.backends.slurm import SlurmBackend

        return SlurmBackend(environ)
    from hpctrain.jobs.backends.local import LocalBackend

    return LocalBackend(environ)


#: Errors of a Slurm that is installed but silent: its login node is no place to train.
_SILENT = ("did not respond within", "Unable to contact slurm controller")


def is_unreachable(trouble: str) -> bool:
    """True if the error means that Slurm is set up here but does not answer."""
    return any(words in trouble for words in _SILENT)


def choose_backend(
    asked: Literal["auto", "slurm", "local"], environ: Mapping[str, str]
) -> tuple[Backend, list[str]]:
    """Return the backend for a submission, and notes for the user about the choice.

    Args:
        asked: `slurm`, `local`, or `auto`, which takes Slurm if it answers.
        environ: environment variables for Slurm's commands.

    Raises:
        SchedulerError: Slurm was requested by name and does not answer, or it is set up here and silent.
    """
    if asked == "local":
        return open_backend("local", environ), []
    from hpctrain.jobs.backends.slurm import SlurmBackend

    slurm = SlurmBackend(environ)
    trouble = slurm.trouble()
    if trouble is None:
        return slurm, []
    if asked == "slurm":
        raise SchedulerError(
            f"Slurm does not respond here: {trouble}. Submit from a login node of the cluster, "
            "or use --backend local to run on this machine."
        )
    if is_unreachable(trouble):
        raise SchedulerError(
            f"Slurm is set up here but does not respond: {trouble}. Try again later, "
            "or use --backend local to run on this machine."
        )
    return open_backend("local", environ), [f"Slurm not available ({trouble}); running on this machine."]
