"""Where jobs run: what a backend is, and which one a submission takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from hpctrain.errors import SchedulerError
from hpctrain.jobs.spec import BackendName, JobSpec
from hpctrain.rundir import RunDir

if TYPE_CHECKING:
    from hpctrain.jobs.record import Job
    from hpctrain.jobs.site.facts import Site
    from hpctrain.jobs.states import JobView


class SubmissionUnclear(SchedulerError):
    """Whether the scheduler took the job cannot be told: the run folder has to stay."""


@dataclass(frozen=True)
class Outlook:
    """What there is to say about a job that nothing speaks against."""

    notes: tuple[str, ...] = ()
    """What the user should know, a line each."""
    foretell: Callable[[], tuple[str, ...]] = tuple
    """When the job starts, and what it may cost; the scheduler may still be thinking about it."""
    refusal: Callable[[], str] = str
    """Why the scheduler would not take the job, in its words; empty where it would, or does not say."""


class Backend(Protocol):
    """One way to run jobs. Job ids are the backend's own words."""

    name: ClassVar[BackendName]

    def check(self, spec: JobSpec, script: str, profile: Site) -> Outlook:
        """Hold what is asked against what exists. Nothing is changed by it.

        Args:
            spec: what was asked for.
            script: the batch script, as it would be submitted.
            profile: what files of options say of the site.

        Raises:
            SpecError: the job cannot be done as asked.
        """

    def submit(self, spec: JobSpec, run: RunDir, lock: int) -> str:
        """Hand the run's job script over and return the job's id.

        Args:
            spec: what was asked for.
            run: the run's folder, written already.
            lock: file descriptor of the run's lock, held by the caller.

        Raises:
            SubmissionUnclear: the scheduler did not answer, and may have taken the job.
            SchedulerError: the scheduler refused, or cannot be reached.
        """

    def look(self, jobs: Sequence[Job]) -> list[JobView]:
        """What the scheduler says about each job; never raises because it cannot be reached."""

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Ask jobs to end for good.

        Raises:
            SchedulerError: the scheduler refused, or cannot be reached.
        """

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Ask the ranks of running jobs to save and to continue in a new attempt.

        Raises:
            SchedulerError: the scheduler refused, or cannot be reached.
        """

    def lift_hold(self, jobs: Sequence[Job]) -> bool:
        """Let requeued jobs start without their delay, and return whether the scheduler agreed."""


def open_backend(name: BackendName, environ: Mapping[str, str]) -> Backend:
    """The backend of that name, with the variables that its commands run under."""
    # Each is imported only when it is needed: a dry run has to be quick.
    if name == "slurm":
        from hpctrain.jobs.backends.slurm import SlurmBackend

        return SlurmBackend(environ)
    from hpctrain.jobs.backends.local import LocalBackend

    return LocalBackend(environ)


#: Words of a Slurm that is there and says nothing: its login node is no place to train on.
_SILENT = ("gave no answer within", "Unable to contact slurm controller")


def is_silent(trouble: str) -> bool:
    """Whether what is wrong with Slurm says that it is set up here, and does not answer."""
    return any(words in trouble for words in _SILENT)


def choose_backend(
    asked: Literal["auto", "slurm", "local"], environ: Mapping[str, str]
) -> tuple[Backend, list[str]]:
    """The backend for a submission, and what the user should know about the choice.

    Args:
        asked: `slurm`, `local`, or `auto`, which takes Slurm where it answers.
        environ: variables that Slurm's commands run under.

    Raises:
        SchedulerError: Slurm was asked for by name and does not answer, or it is set up here and silent.
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
            f"Slurm does not answer here: {trouble}. Submit from a login node of the cluster, "
            "or take --backend local to run on this machine."
        )
    if is_silent(trouble):
        raise SchedulerError(
            f"Slurm is set up here, but does not answer: {trouble}. Try again later, "
            "or take --backend local to run on this very machine."
        )
    return open_backend("local", environ), [
        f"No Slurm here ({trouble}): the run goes to this machine itself."
    ]
