"""Functions as jobs, through submitit's interface: an executor submits them, a job has their results.

Only the interface is submitit's. A job is a run like any other, in a folder of its own and under the same
supervisor; `hpctrain.jobs.functions` submits it and reads what it left.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

import submitit
from submitit.core.core import InfoWatcher
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths, UncompletedJobError

from hpctrain.errors import HpctrainError, RunFailed, SpecError, UserError
from hpctrain.jobs.doubt import Doubt
from hpctrain.jobs.duration import format_duration
from hpctrain.jobs.functions import FunctionFailure, read_call, read_printed, read_result, submit_calls
from hpctrain.jobs.given import nearest
from hpctrain.jobs.options import SubmitOptions, options
from hpctrain.jobs.record import read_record
from hpctrain.jobs.runs import Run, find_run
from hpctrain.jobs.spec import JobSpec
from hpctrain.jobs.states import RunState
from hpctrain.jobs.status import RunStatus
from hpctrain.jobs.watch import Watcher
from hpctrain.pickles import Call
from hpctrain.rundir import RunDir

log = logging.getLogger("hpctrain")

#: Seconds between two looks at a job that is waited for; they burden nobody but this machine.
_LOOK_S = 0.2

R = TypeVar("R", covariant=True)

#: Options of a submission that an executor sets itself, and what to use in their place.
_OURS = {
    "run_dir": "Every job of an executor has a run folder of its own; give their parent as `folder`.",
    "array": "Use map_array(), submit_array() or batch().",
}
#: How many tasks of an array may run at once, as submitit calls it.
_AT_ONCE = "array_parallelism"


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


class RunWatcher(InfoWatcher):
    """Knows where runs stand. Each scheduler is asked once for all of them.

    An end is read from the run's own record. Holds that Slurm puts on requeued jobs are lifted on the way.
    Runs go by the paths of their folders: a scheduler gives its numbers again some day.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Jobs are waited for in threads.
        self._lock = threading.RLock()
        self._runs: dict[str, Run] = {}
        self._statuses: dict[str, RunStatus] = {}
        self._watcher = Watcher([], {})
        self._watched: list[str] = []

    def follow(self, run: Run) -> None:
        """Look at `run`, too, from now on."""
        key = str(run.dir.path)
        with self._lock:
            self._runs.setdefault(key, run)
            if key not in self._registered:
                self.register_job(key)

    def status(self, run: Run, mode: str = "standard") -> RunStatus | None:
        """Where the run stands, or stood at the last look where another would burden the scheduler."""
        self.follow(run)
        key = str(run.dir.path)
        with self._lock:
            self.update_if_long_enough(mode)
            if mode != "cache" and key not in self._finished and read_record(run.dir).finished:
                self._learn([key], Watcher([run.dir], run.environ))
            return self._statuses.get(key)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode).get("State", RunState.UNKNOWN.value)

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        status = self.status(self._runs[job_id], mode)
        return {} if status is None else {"JobID": status.job_id or "", "State": status.state.value}

    def update_if_long_enough(self, mode: str) -> None:
        if mode == "force" or (
            mode == "standard" and time.time() - self._last_status_check >= self._watcher.poll_s
        ):
            self.update()

    def update(self) -> None:
        """Look at all runs that have not ended."""
        with self._lock:
            going = [key for key in self._runs if key not in self._finished]
            if going != self._watched:
                self._watcher = Watcher([self._runs[key].dir for key in going], os.environ)
                self._watched = going
            self._num_calls += 1
            self._learn(going, self._watcher)
            self._last_status_check = time.time()

    def _learn(self, keys: Sequence[str], watcher: Watcher) -> None:
        for key, status in zip(keys, watcher.look(), strict=True):
            self._statuses[key] = status
            if status.state.ended:
                self._finished.add(key)
            elif status.held:
                self._runs[key].lift_hold()


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


class Executor(submitit.Executor):
    """Submits functions. Every rank calls the function, with the process group ready.

    Args:
        folder: where the jobs' run folders are made.
        **options: see `SubmitOptions`; they are named as on the command line.

    Raises:
        SpecError: there is no such option.
    """

    job_class = Job

    def __init__(self, folder: str | os.PathLike[str] = "runs", **options: Unpack[SubmitOptions]) -> None:
        super().__init__(os.fspath(folder))
        self._told: set[str] = set()
        self.update_parameters(**options)

    @classmethod
    def name(cls) -> str:
        return "hpctrain"

    def job(self, run_id: str) -> Job[Any]:
        """The job of that run id, or of that run folder: for a program that did not submit it itself.

        Raises:
            RunNotFound: there is none.
            UserError: it is a job array.
        """
        run = find_run(run_id, self.folder, os.environ)
        if tasks := run.tasks():
            raise UserError(
                f"{run_id!r} is an array of {len(tasks)} jobs. Take one, such as {tasks[0].run_id!r}."
            )
        return Job.of(run)

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {*options(), _AT_ONCE} - _OURS.keys()

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Set options; None takes one back.

        Raises:
            SpecError: there is no such option.
        """
        for name, value in kwargs.items():
            known, meant = _translated(name, value)
            if meant is None:
                self.parameters.pop(known, None)
            else:
                self.parameters[known] = meant

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[submitit.Job[Any]]:
        calls = [Call(delayed.function, delayed.args, delayed.kwargs) for delayed in delayed_submissions]
        asked = dict(self.parameters)
        at_once = asked.pop(_AT_ONCE, 0)
        runs, world_size = submit_calls(
            calls,
            cast(SubmitOptions, asked),
            folder=self.folder,
            at_once=at_once,
            environ=dict(os.environ),
            told=self._told,
        )
        return [Job(run.dir.path, run.job_id or "", range(world_size)) for run in runs]


def _translated(name: str, value: Any) -> tuple[str, Any]:
    """An option and its value, out of what submitit or we call it.

    Raises:
        SpecError: there is no such option.
    """
    plain, known = name.removeprefix("slurm_"), Executor._valid_parameters()
    if plain == "timeout_min":
        return "time", None if value is None else format_duration(60 * value)
    if plain == "mem_gb":
        return "mem", None if value is None else f"{round(1024 * value)}M"
    if plain in known:
        return plain, value
    hint = _OURS.get(plain) or nearest(plain, sorted(known))
    raise SpecError(f"Executor has no parameter {name!r}. {hint}")
