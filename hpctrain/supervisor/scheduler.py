"""Whoever gave the job its place, as the supervisor needs it: Slurm, or a stand-in on a laptop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Protocol

from hpctrain.errors import SpecError
from hpctrain.jobs.duration import parse_duration
from hpctrain.jobs.environment import outer_environment
from hpctrain.jobs.slurm_command import job_state, run_slurm
from hpctrain.jobs.spec import JobSpec


class Scheduler(Protocol):
    """What the supervisor asks of the scheduler."""

    #: Name of the job, as submission recorded it.
    job_id: str
    #: Signals to the supervisor, and which one the ranks then need; None where they have it already.
    on_signal: Mapping[signal.Signals, signal.Signals | None]
    #: Signals by which the user, and not the scheduler, ends the job.
    cancels: frozenset[signal.Signals]

    @property
    def ends_job_at(self) -> float | None:
        """When the supervisor has to end the job, on the monotonic clock; None where the scheduler does."""

    def is_ending_job(self) -> bool:
        """Whether the scheduler is ending the job, and so decides what follows."""

    def seconds_left(self) -> float | None:
        """Time until the job's limit; None where there is none, or nobody knows."""

    def requeue(self) -> bool:
        """Put the job back into the queue. True: this process is about to be ended. False: go on here.

        Raises:
            SchedulerError: the scheduler refused.
        """


def own_job_id(environ: Mapping[str, str]) -> str:
    """The job that this batch script belongs to, in Slurm's commands.

    A task of an array is named by the array and its number. SLURM_JOB_ID is a number of its own for all tasks
    but one: the last one's is that of the whole array, and a request by it would meet all other tasks.
    """
    if "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


class SlurmJob:
    """The job that this batch script belongs to."""

    ends_job_at: float | None = None
    # Slurm signals the steps itself; SIGTERM to the batch script says that it is ending the job.
    on_signal: Mapping[signal.Signals, signal.Signals | None] = {signal.SIGTERM: None}
    cancels: frozenset[signal.Signals] = frozenset()

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.job_id = own_job_id(environ)
        self._environ = outer_environment(environ)

    def is_ending_job(self) -> bool:
        """Whether the job is in any state but running. See `Scheduler.is_ending_job`."""
        return job_state(self.job_id, self._environ) not in ("RUNNING", None)

    def seconds_left(self) -> float | None:
        """What `squeue` says. See `Scheduler.seconds_left`."""
        text = run_slurm(
            ["squeue", "--noheader", f"--jobs={self.job_id}", "--format=%L"], self._environ
        ).strip()
        try:
            return parse_duration(text)
        except SpecError:
            return None  # UNLIMITED, NOT_SET, INVALID

    def requeue(self) -> bool:
        """`scontrol requeue`. See `Scheduler.requeue`."""
        run_slurm(["scontrol", "requeue", self.job_id], self._environ)
        return True


class LocalJob:
    """A laptop's stand-in for the scheduler: the time limit, preemption by SIGUSR2, the user's SIGTERM."""

    on_signal: Mapping[signal.Signals, signal.Signals | None] = {
        signal.SIGUSR2: signal.SIGTERM,
        signal.SIGTERM: signal.SIGTERM,
        signal.SIGINT: signal.SIGTERM,
    }
    cancels = frozenset({signal.SIGTERM, signal.SIGINT})

    def __init__(self, spec: JobSpec) -> None:
        in_array = spec.array_task is not None
        self.job_id = f"{os.getppid()}_{spec.array_task}" if in_array else str(os.getpid())
        self._limit_s = spec.time_limit_s
        self._begun = time.monotonic()

    @property
    def ends_job_at(self) -> float | None:
        """The end of the specification's time limit."""
        return None if self._limit_s is None else self._begun + self._limit_s

    def is_ending_job(self) -> bool:
        """Never: nobody but the user ends a job here."""
        return False

    def seconds_left(self) -> float | None:
        """What is left of the specification's limit. See `Scheduler.seconds_left`."""
        return None if self.ends_job_at is None else self.ends_job_at - time.monotonic()

    def requeue(self) -> bool:
        """The queue is empty, so the job starts again at once, in this process, with all its time."""
        self._begun = time.monotonic()
        return False
