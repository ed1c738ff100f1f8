"""A submitted run: status, logs, wait, cancel and requeue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from hpctrain.errors import RunFailed, RunNotFound, SpecError, WaitTimeout
from hpctrain.files import is_locked
from hpctrain.records.run_record import read_run_record
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import RunState
from hpctrain.text import format_ranks, pluralize, suggest

# Submitting a run does not require the status modules, so they are imported on use.
if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus
    from hpctrain.jobs.runs.status_poller import StatusPoller, UnknownStateTracker
    from hpctrain.record_types import Event

#: A supervisor exits shortly after it has recorded the end.
_EXIT_TIMEOUT_S = 5.0


class Run(Struct, frozen=True):
    """A submitted run. It caches no state: every call queries again."""

    dir: RunDir
    #: Environment variables for the scheduler's commands. Some may be secret.
    environ: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Run({str(self.dir)!r})"

    @property
    def run_id(self) -> str:
        return self.dir.run_id

    @property
    def job_id(self) -> str | None:
        """The scheduler's id of the job submitted last."""
        return read_run_record(self.dir).job_id

    def log_path(self, rank: int = 0) -> Path | None:
        """Return the rank's log in the newest attempt; None before the first attempt."""
        attempts = self.dir.attempts()
        return self.dir.rank_log(attempts[-1], rank) if attempts else None

    def status(self) -> RunStatus:
        return query_statuses([self])[0]

    def tasks(self) -> list[Run]:
        """Return the tasks of a job array as runs; empty for a single run."""
        return [Run(self.dir.task(index), self.environ) for index in self.dir.tasks()]

    def watch(self) -> Iterator[RunStatus]:
        """Yield the status repeatedly; the last status is that of the ended run."""
        yield from self._watch(None)

    def wait(self, timeout: float | None = None, unknown_limit: float | None = None) -> RunStatus:
        """Wait until the run has ended successfully.

        Args:
            timeout: maximum wait in seconds; None waits without limit.
            unknown_limit: see `wait_for_end`.

        Raises:
            RunFailed: it failed or was cancelled.
            WaitTimeout: it has not ended yet.
            SchedulerError: its state has been unknown for too long, or it will never start.
        """
        return check_completed(self.wait_for_end(timeout, unknown_limit))

    def wait_for_end(
        self,
        timeout: float | None = None,
        unknown_limit: float | None = None,
        report: Callable[[str], object] | None = None,
    ) -> RunStatus:
        """Wait until the run has ended, successfully or not.

        Args:
            timeout: maximum wait in seconds; None waits without limit.
            unknown_limit: maximum seconds without a definite answer from the scheduler or new output of
                the run; None means an hour.
            report: called with a message at intervals while the state is unknown; None logs the message.

        Raises:
            WaitTimeout: it has not ended yet.
            SchedulerError: its state has been unknown for too long, or it will never start.
        """
        import logging

        from hpctrain.jobs.runs.status_poller import UNKNOWN_LIMIT_S, UnknownStateTracker, describe_unknown

        tracker = UnknownStateTracker(UNKNOWN_LIMIT_S if unknown_limit is None else unknown_limit)
        report = report or logging.getLogger("hpctrain").warning
        for status in self._watch(timeout, tracker):
            if message := tracker.message_for(status):
                report(f"Waiting for run {self.run_id}: {message}")
        if not status.state.ended:
            state = describe_unknown(status) if status.state is RunState.UNKNOWN else status.state
            raise WaitTimeout(
                f"Run {self.run_id} did not end within {timeout:g} s (state: {state}). "
                "Wait again, or cancel the run."
            )
        self.await_exit()
        return status

    def _watch(
        self, limit_s: float | None, tracker: UnknownStateTracker | None = None
    ) -> Iterator[RunStatus]:
        deadline = time.monotonic() + (math.inf if limit_s is None else limit_s)
        poller = _poller([self])
        while True:
            (status,) = poller.poll()
            yield status
            remaining_s = deadline - time.monotonic()
            if status.state.ended or remaining_s <= 0:
                return
            pause = min(poller.poll_s, remaining_s)
            time.sleep(min(pause, tracker.left_s) if tracker is not None and tracker.left_s else pause)

    def await_exit(self) -> None:
        """Wait for the local supervisor of an ended run to exit."""
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        with suppress(PermissionError):  # another user's run
            while is_locked(self.dir.lock) and time.monotonic() < deadline:
                time.sleep(0.02)

    def cancel(self) -> RunStatus:
        """Ask the run to save its state and end permanently; return its previous status.

        An ended run is left unchanged. In a job array, this applies to every task.

        Raises:
            SchedulerError: the scheduler refused or cannot be reached.
        """
        from hpctrain.jobs.runs import run_control

        return run_control.cancel(self.dir, self.environ)

    def requeue(self) -> RunStatus:
        """Ask the run to save its state and continue in a new attempt; return its previous status.

        If Slurm delays the requeued job, end the delay. In a job array, this applies to every task.

        Raises:
            SpecError: the run is neither running nor delayed.
            SchedulerError: the scheduler refused or cannot be reached.
        """
        from hpctrain.jobs.runs import run_control

        return run_control.requeue(self.dir, self.environ)


def check_completed(status: RunStatus) -> RunStatus:
    if status.state in (RunState.COMPLETED, RunState.STOPPED_EARLY):
        return status
    if status.state is RunState.CANCELLED:
        raise RunFailed(f"Run {status.run_id} was cancelled.")
    raise RunFailed(f"Run {status.run_id} failed: {status.cause}. Log: {status.log}")


def require_single(run: Run) -> None:
    """Reject a job array."""
    if tasks := run.tasks():
        raise SpecError(f"Run {run.run_id} is a job array. Specify a task, such as {tasks[0].dir.path}.")


def require_running(run: Run, *, done: str) -> RunStatus:
    """Return the status of a single run that is running, although its ranks may not have started."""
    require_single(run)
    status = run.status()
    if status.state is not RunState.RUNNING:
        raise SpecError(f"Run {run.run_id} is {status.state}. Only a run that is RUNNING can be {done}.")
    return status


def require_running_ranks(
    run: Run, ranks: Sequence[int], *, option: str, done: str
) -> tuple[RunStatus, Event]:
    """Return the status of a running run with these `ranks`, and the newest start of its ranks."""
    status = require_running(run, done=done)
    started = [event for event in run.dir.read_events() if event.kind == "started"]
    if not started:
        raise SpecError(
            f"The ranks of run {run.run_id} have not started yet, so they cannot be {done}. Try again in a "
            "few seconds."
        )
    world_size = started[-1].world_size  # None for a batch script
    if world_size is not None and (missing := [rank for rank in ranks if rank >= world_size]):
        raise SpecError(
            f"Run {run.run_id} has no {format_ranks(missing)} ({option}). It has "
            f"{pluralize(world_size, 'rank')}, numbered from 0."
        )
    return status, started[-1]


def query_statuses(runs: Sequence[Run], *, skip_unreadable: bool = False) -> list[RunStatus]:
    """Return the status of each run, querying each scheduler once for all of them."""
    return _poller(runs, skip_unreadable=skip_unreadable).poll() if runs else []


def _poller(runs: Sequence[Run], *, skip_unreadable: bool = False) -> StatusPoller:
    from hpctrain.jobs.runs.status_poller import StatusPoller

    return StatusPoller([run.dir for run in runs], runs[0].environ, skip_unreadable=skip_unreadable)


def find_run(run: str, runs_dir: Path, environ: Mapping[str, str]) -> Run:
    """Return the run with that id or job id in `runs_dir`, or with that folder."""
    for folder in (runs_dir / run, Path(run).absolute()):
        try:
            has_spec = RunDir(folder).spec.is_file()
        except OSError as error:
            raise RunNotFound(f"Cannot access run {run!r}: {_trouble(error)}.") from error
        if has_spec:
            return Run(RunDir(folder.absolute()), environ)
    listed = list_runs(runs_dir, environ)
    job_id, _, task = run.partition("_")
    for candidate in reversed(listed) if job_id.isdecimal() else ():
        with suppress(OSError):
            if candidate.job_id == job_id:
                found = Run(candidate.dir.task(int(task)), environ) if task.isdecimal() else candidate
                if found.dir.path.is_dir():
                    return found
    hint = suggest(
        run,
        [candidate.run_id for candidate in listed],
        otherwise="Use `hpctrain list` to list all runs, or --runs-dir to select another folder.",
    )
    for folder in (runs_dir / run, Path(run)):
        if (path := RunDir(folder).checkpoints).is_dir():
            raise RunNotFound(
                f"{str(path)!r} contains checkpoints, but no run has been submitted with the run folder "
                f"{str(folder)!r}. To resume from the checkpoints, use `hpctrain submit --run-dir`. To list "
                "them, use `hpctrain checkpoints`."
            )
    raise RunNotFound(
        f"There is no run {run!r} in {str(runs_dir)!r}, and {run!r} is not the path of a run folder. {hint}"
    )


def list_runs(runs_dir: Path, environ: Mapping[str, str]) -> list[Run]:
    """Return all accessible runs in `runs_dir` by time of submission, oldest first."""
    try:
        folders = [folder.absolute() for folder in runs_dir.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunNotFound(f"Cannot list the runs (--runs-dir): {_trouble(error)}.") from error
    submitted: list[tuple[float, str, Path]] = []
    for folder in folders:
        with suppress(OSError):
            submitted.append((RunDir(folder).spec.stat().st_mtime, folder.name, folder))
    return [Run(RunDir(folder), environ) for _, _, folder in sorted(submitted)]


def _trouble(error: OSError) -> str:
    return f"{error.strerror}: {error.filename!r}"
