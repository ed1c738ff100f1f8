"""A submitted function, its result and its failure."""

from __future__ import annotations

import logging
import math
import os
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import submitit
from submitit.core.core import InfoWatcher
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths, UncompletedJobError

from hpctrain.errors import HpctrainError, RunFailed, UserError
from hpctrain.files import read_regular
from hpctrain.jobs.runs.run import Run
from hpctrain.records.call_payload import CallPayload
from hpctrain.records.run_record import read_run_record
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import RunState
from hpctrain.text import format_ranks

# Submitting a function does not require these modules.
if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus
    from hpctrain.jobs.runs.status_poller import StatusPoller


class RunWatcher(InfoWatcher):
    """Cache of runs' statuses. Each scheduler is queried once for all runs."""

    def __init__(self) -> None:
        super().__init__()
        #: Needed because callers wait for jobs in threads.
        self._lock = threading.RLock()
        self._runs: dict[str, Run] = {}
        self._statuses: dict[str, RunStatus] = {}
        self._poller: StatusPoller | None = None
        self._watched: list[str] = []

    def add_run(self, run: Run) -> None:
        with self._lock:
            if str(run.dir.path) not in self._runs:
                self._runs[str(run.dir.path)] = run
                self._last_status_check = -math.inf

    def status(self, run: Run, mode: str = "standard") -> RunStatus | None:
        from hpctrain.jobs.runs.status_poller import StatusPoller

        self.add_run(run)
        key = str(run.dir.path)
        with self._lock:
            poll_s = 0.0 if self._poller is None else self._poller.poll_s
            is_due = mode == "standard" and time.time() - self._last_status_check >= poll_s
            if is_due or mode == "force":
                self.update()
            if mode != "cache" and key not in self._finished and read_run_record(run.dir).finished:
                self._cache_statuses([key], StatusPoller([run.dir], run.environ))
            return self._statuses.get(key)

    def update(self) -> None:
        from hpctrain.jobs.runs.status_poller import StatusPoller

        with self._lock:
            active = [key for key in self._runs if key not in self._finished]
            if self._poller is None or active != self._watched:
                self._poller = StatusPoller([self._runs[key].dir for key in active], os.environ)
                self._watched = active
            self._num_calls += 1
            self._cache_statuses(active, self._poller)
            self._last_status_check = time.time()

    def _cache_statuses(self, keys: Sequence[str], poller: StatusPoller) -> None:
        for key, status in zip(keys, poller.poll(), strict=True):
            self._statuses[key] = status
            if status.state.ended:
                self._finished.add(key)


log = logging.getLogger("hpctrain")

#: Seconds between two polls of a job; polls only load this machine.
_POLL_INTERVAL_S = 0.2
#: Seconds to wait for a file from another host to become visible on this host.
_RESULT_TIMEOUT_S = 30.0

R = TypeVar("R", covariant=True)


class JobFailed(RunFailed, FailedJobError):
    """Failure of the function, caused by its exception if that could be pickled."""

    rank: int | None = None
    """The rank that failed first; None if no rank could be started."""
    host: str | None = None
    log: str | None = None
    """Log of that rank."""

    @classmethod
    def from_status(cls, status: RunStatus) -> JobFailed:
        from hpctrain.record_types import FailureRecord, read_record

        run = status.dir
        failure = read_run_record(run).failure
        if failure is not None and failure.cause != status.cause:
            failure = None  # That attempt was not the last attempt.
        rank = failure.rank if failure is not None and failure.rank != -1 else None
        message = f"Run {status.run_id} failed: {str(status.cause).rstrip('.')}. Log: {status.log}"
        cause = None
        if failure is not None and rank is not None:
            with suppress(OSError, ValueError):
                record = read_record(run.failure(failure.attempt, rank), FailureRecord)
                message += f"\n\n{record.traceback}".rstrip()
            # Unpickling runs code of the exception's class, which may not exist on this machine.
            with suppress(Exception):
                cause = pickle.loads(read_regular(run.exception_pickle(failure.attempt, rank)))
        error = cls(message)
        error.rank, error.host, error.log = rank, failure.host if failure else None, status.log
        error.__cause__ = cause
        return error


class JobCancelled(RunFailed, UncompletedJobError):
    """The job was cancelled."""


class RunJobPaths(JobPaths):
    """Files of a run folder under submitit's names; logs and results are those of the newest attempt."""

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
        return self._run.rank_log(self._attempt, self.task_id)

    @property
    def stderr(self) -> Path:
        return self.stdout  # contains both streams in the order of writing

    @property
    def _attempt(self) -> int:
        return max(self._run.attempts(), default=0)


class Job(submitit.Job[R]):
    """A submitted function: a run with submitit's interface."""

    watcher = RunWatcher()

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        self.run = Run(RunDir(Path(folder).absolute()), os.environ)
        super().__init__(folder, job_id, tasks)
        self._paths = RunJobPaths(self.run.dir, job_id, self.task_id)

    def submission(self) -> DelayedSubmission:
        call = CallPayload.read(self.run.dir.function).deserialize()
        return DelayedSubmission(call.function, *call.args, **call.kwargs)

    def cancel(self, check: bool = True) -> None:
        """Ask the ranks to stop, and end the run permanently.

        Raises:
            SchedulerError: with `check`, if the scheduler refused or cannot be reached.
        """
        try:
            self.run.cancel()
        except HpctrainError:
            if check:
                raise

    def done(self, force_check: bool = False) -> bool:
        """True if the run has ended, successfully or not."""
        status = self.watcher.status(self.run, "force" if force_check else "standard")
        return status is not None and status.state.ended

    def wait(self) -> None:
        """Wait until the run has ended, successfully or not.

        Raises:
            SchedulerError: the state was unknown for an hour without new output, or the run will never start.
        """
        from hpctrain.jobs.runs.status_poller import UnknownStateTracker

        tracker = UnknownStateTracker()
        while (status := self.watcher.status(self.run)) is None or not status.state.ended:
            if status is not None and (message := tracker.message_for(status)):
                log.warning(f"Waiting for run {status.run_id}: {message}")
            time.sleep(_POLL_INTERVAL_S)
        self.run.await_exit()

    def result(self) -> R:
        """Wait for the end, and return the function's result.

        Raises:
            UserError: there are several ranks, and so several results.
            JobFailed: the function failed.
            JobCancelled: it was cancelled.
        """
        if self.num_tasks > 1:
            raise UserError(
                f"This job has {self.num_tasks} ranks, each with its own result. Use results(), or "
                "task(0).result() for the result of rank 0."
            )
        return self.results()[0]

    def results(self) -> list[R]:
        """Wait for the end, and return the function's result on each rank, in order of ranks.

        Raises:
            JobFailed: the function failed.
            JobCancelled: it was cancelled.
        """
        if (error := self.exception()) is not None:
            raise error
        finished = read_run_record(self.run.dir).finished
        attempt = finished.attempt if finished is not None else 0
        return [_read_result(self.run.dir, attempt, rank) for rank in self._tasks]

    def exception(self) -> UncompletedJobError | None:
        """Wait for the end, and return the failure; None if there is a result.

        A run fails as a unit: for all ranks, this is the first failure, which caused the others.
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
                return JobFailed.from_status(status)

    @property
    def state(self) -> str:
        """`PENDING`, `RUNNING`, `COMPLETED`, `FAILED`, `CANCELLED`, or `UNKNOWN`."""
        return self.get_info("standard").get("State", RunState.UNKNOWN.value)

    def get_info(self, mode: str = "force") -> dict[str, str]:
        status = self.watcher.status(self.run, mode)
        return {} if status is None else {"JobID": status.job_id or "", "State": status.state.value}

    def _register_in_watcher(self) -> None:
        self.watcher.add_run(self.run)

    def stdout(self) -> str | None:
        """Return the ranks' output of all attempts; for ranks without a log, the job's own output."""
        logs = _logs_of(self.run.dir, self._tasks)
        is_final = not all(logs.values()) and self.done()
        if is_final:
            logs = _logs_of(self.run.dir, self._tasks)  # A log may have appeared in the meantime.
        texts = [
            b"".join(map(read_regular, paths)).decode(errors="replace") for paths in logs.values() if paths
        ]
        if is_final and (silent := [rank for rank, paths in logs.items() if not paths]):
            texts.append(_job_output(self.run.dir, silent))
        return "\n".join(texts) if texts else None

    def stderr(self) -> str | None:
        return self.stdout()  # Both streams of a rank are written to one log.

    def __del__(self) -> None:
        if self._cancel_at_deletion and not self.done():
            self.cancel(check=False)

    def __getstate__(self) -> dict[str, Any]:
        # Do not write environment variables to disk.
        return {**self.__dict__, "run": Run(self.run.dir, {})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "run": Run(state["run"].dir, os.environ)})


def _read_result(run: RunDir, attempt: int, rank: int) -> Any:
    path = run.result(attempt, rank)
    deadline = time.monotonic() + _RESULT_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise RunFailed(f"Rank {rank} of run {run.run_id} wrote no result: {path} does not exist.")
        time.sleep(0.2)
    try:
        return pickle.loads(read_regular(path))
    except Exception as error:
        error.add_note(f"while reading the result of rank {rank} from {path}")
        raise


def _logs_of(run: RunDir, ranks: Sequence[int]) -> dict[int, list[Path]]:
    attempts = run.attempts()
    return {
        rank: [log for attempt in attempts if (log := run.rank_log(attempt, rank)).exists()] for rank in ranks
    }


def _job_output(run: RunDir, ranks: list[int]) -> str:
    silence = f"{format_ranks(ranks).capitalize()} of run {run.run_id} wrote no log."
    for path in (run.slurm_log, run.supervisor_log):
        with suppress(OSError):
            if text := read_regular(path).decode(errors="replace"):
                return f"{silence} Output of the job ({path}):\n{text}"
    return f"{silence} The job printed no output either.\n"
