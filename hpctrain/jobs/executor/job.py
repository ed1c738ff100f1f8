"""A function that was submitted, and how it ended."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths, UncompletedJobError

from hpctrain.errors import HpctrainError, RunFailed, UserError
from hpctrain.jobs.doubt import Doubt
from hpctrain.jobs.executor.watcher import RunWatcher
from hpctrain.jobs.functions import FunctionFailure, read_call, read_printed, read_result
from hpctrain.jobs.runs import Run
from hpctrain.jobs.spec import JobSpec
from hpctrain.jobs.states import RunState
from hpctrain.rundir import RunDir

log = logging.getLogger("hpctrain")

#: Seconds between two looks at a job that is waited for; they burden nobody but this machine.
_LOOK_S = 0.2

R = TypeVar("R", covariant=True)


class JobFailed(RunFailed, FailedJobError):
    """The function failed. The message names the rank that failed first, and has its traceback.

    The exception itself, where it could be pickled, is the cause (`__cause__`).
    """

    rank: int | None = None
    """The rank that failed first; None where no rank could be started."""
    host: str | None = None
    log: str | None = None
    """What that rank printed."""

    @classmethod
    def of(cls, failure: FunctionFailure) -> JobFailed:
        error = cls(failure.message)
        error.rank, error.host, error.log = failure.rank, failure.host, failure.log
        error.__cause__ = failure.exception
        return error


class JobCancelled(RunFailed, UncompletedJobError):
    """The job was cancelled."""


class RunPaths(JobPaths):
    """submitit's names for files of a run folder."""

    def __init__(self, run: RunDir, job_id: str, rank: int | None) -> None:
        super().__init__(run.path, job_id, rank)
        self._run = run

    @property
    def folder(self) -> Path:
        return self._run.path

    @property
    def submission_file(self) -> Path:
        return self._run.job_script

    @property
    def submitted_pickle(self) -> Path:
        return self._run.function

    @property
    def result_pickle(self) -> Path:
        return self._run.result(self._attempt, self.task_id)

    @property
    def stdout(self) -> Path:
        """The rank's log in the newest attempt."""
        return self._run.rank_log(self._attempt, self.task_id)

    @property
    def stderr(self) -> Path:
        """The same log: both streams go into it, in the order in which they are written."""
        return self.stdout

    @property
    def _attempt(self) -> int:
        return max(self._run.attempts(), default=0)


class Job(submitit.Job[R]):
    """A function that was submitted: a run, with submitit's way of asking for it."""

    watcher = RunWatcher()

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        self.run = Run(RunDir(Path(folder).absolute()), os.environ)
        super().__init__(folder, job_id, tasks)
        self._paths = RunPaths(self.run.dir, job_id, self.task_id)

    @classmethod
    def of(cls, run: Run) -> Job[Any]:
        """The job of a run that an executor submitted.

        Raises:
            SpecError: the run has no specification.
        """
        return cls(run.dir.path, run.job_id or "", range(JobSpec.load(run.dir.spec).world_size))

    def submission(self) -> DelayedSubmission:
        call = read_call(self.run.dir)
        return DelayedSubmission(call.function, *call.args, **call.kwargs)

    def cancel(self, check: bool = True) -> None:
        """Ask the ranks to stop, and end the run for good.

        Raises:
            SchedulerError: with `check`, where the scheduler refused, or cannot be reached.
        """
        try:
            self.run.cancel()
        except HpctrainError:
            if check:
                raise

    def done(self, force_check: bool = False) -> bool:
        """Whether the run has ended, with success or without."""
        status = self.watcher.status(self.run, "force" if force_check else "standard")
        return status is not None and status.state.ended

    def wait(self) -> None:
        """Wait for the end, however that is.

        Raises:
            SchedulerError: for an hour nobody could say where the run stands, and it wrote nothing.
        """
        doubt = Doubt()
        while (status := self.watcher.status(self.run)) is None or not status.state.ended:
            if status is not None and (words := doubt.words(status)):
                log.warning(f"Waiting for run {status.run_id}: {words}")
            time.sleep(_LOOK_S)
        self.run.await_exit()

    def result(self) -> R:
        """Wait for the end, and return what the function returned.

        Raises:
            UserError: there are several ranks, and so several results.
            JobFailed: the function failed.
            JobCancelled: it was cancelled.
        """
        if self.num_tasks > 1:
            raise UserError(
                f"This job has {self.num_tasks} ranks, and so as many results: take results(), "
                "or task(0).result() for that of rank 0."
            )
        return self.results()[0]

    def results(self) -> list[R]:
        """Wait for the end, and return what the function returned in each rank, in their order.

        Raises:
            JobFailed: the function failed.
            JobCancelled: it was cancelled.
        """
        if (error := self.exception()) is not None:
            raise error
        return [read_result(self.run.dir, rank) for rank in self._tasks]

    def exception(self) -> UncompletedJobError | None:
        """Wait for the end, and return why there is no result; None where there is one.

        A run fails as a whole: whichever rank is asked for, the failure is told that the others follow from.
        """
        self.wait()
        status = self.watcher.status(self.run)
        assert status is not None
        match status.state:
            case RunState.COMPLETED:
                return None
            case RunState.CANCELLED:
                return JobCancelled(f"Run {status.run_id} was cancelled.")
            case _:
                return JobFailed.of(FunctionFailure.of(status))

    @property
    def state(self) -> str:
        """`PENDING`, `RUNNING`, `COMPLETED`, `FAILED`, `CANCELLED`, or `UNKNOWN` where nobody can tell."""
        return self.watcher.get_state(self._key)

    def get_info(self, mode: str = "force") -> dict[str, str]:
        return self.watcher.get_info(self._key, mode)

    @property
    def _key(self) -> str:
        return str(self.run.dir.path)

    def _register_in_watcher(self) -> None:
        self.watcher.follow(self.run)

    def stdout(self) -> str | None:
        """What the ranks printed, in all attempts; of ranks that began no log, what the job itself did."""
        return read_printed(self.run.dir, self._tasks, self.done)

    def stderr(self) -> str | None:
        """The same: both streams of a rank go into one log."""
        return self.stdout()

    def __del__(self) -> None:
        if self._cancel_at_deletion and not self.done():
            self.cancel(check=False)

    def __getstate__(self) -> dict[str, Any]:
        # Variables of an environment are nothing to write down.
        return {**self.__dict__, "run": Run(self.run.dir, {})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "run": Run(state["run"].dir, os.environ)})
