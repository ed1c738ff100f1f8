"""A run, seen from the login node: look at it, wait for it, end it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import RunFailed, RunNotFound, SchedulerError, SpecError, WaitTimeout
from hpctrain.files import is_locked
from hpctrain.jobs.backends import Backend, open_backend
from hpctrain.jobs.states import JobView, RunState
from hpctrain.jobs.status import Record, RunStatus, read_record, settle
from hpctrain.rundir import RunDir

#: Asking a scheduler is not free for others; the local lock is.
_POLL_S = {"slurm": 2.0, "local": 0.2}

#: A supervisor has nothing to do after it has recorded the end.
_EXIT_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Run:
    """A run that has been submitted. Holds no state: every question is asked anew."""

    dir: RunDir
    #: Variables that the scheduler's commands run under.
    environ: Mapping[str, str]

    @property
    def run_id(self) -> str:
        return self.dir.path.name

    @property
    def job_id(self) -> str | None:
        """The scheduler's id of the job that was submitted last."""
        return read_record(self.dir).job_id

    @property
    def poll_s(self) -> float:
        """Seconds between two looks that burden nobody."""
        return _POLL_S.get(read_record(self.dir).backend or "local", 2.0)

    def log_path(self, rank: int = 0) -> Path | None:
        """The rank's log in the newest attempt; None before the first."""
        attempts = self.dir.attempts()
        return self.dir.rank_log(attempts[-1], rank) if attempts else None

    def status(self) -> RunStatus:
        """Where the run stands now."""
        return statuses([self])[0]

    def watch(self) -> Iterator[RunStatus]:
        """Yield the status again and again, the last one when the run has ended.

        Delays that Slurm puts on the requeued job are lifted on the way.
        """
        while True:
            status = self.status()
            yield status
            if status.state.ended:
                return
            if status.held:
                self.lift_hold()
            time.sleep(self.poll_s)

    def wait(self, timeout: float | None = None) -> RunStatus:
        """Wait until the run has ended with success.

        Args:
            timeout: seconds to wait at most; None waits as long as it takes.

        Raises:
            RunFailed: it ended otherwise.
            WaitTimeout: it has not ended yet.
        """
        return ended_well(self.wait_for_end(timeout))

    def wait_for_end(self, timeout: float | None = None) -> RunStatus:
        """Wait until the run has ended, however that is.

        Args:
            timeout: seconds to wait at most; None waits as long as it takes.

        Raises:
            WaitTimeout: it has not ended yet.
        """
        start = time.monotonic()
        for status in self.watch():
            if not status.state.ended and timeout is not None and time.monotonic() - start >= timeout:
                raise WaitTimeout(
                    f"Run {self.run_id} has not ended within {timeout:g} s: it is {status.state}. "
                    "It goes on; wait again, or cancel it."
                )
        self.await_exit()
        return status

    def await_exit(self) -> None:
        """Let the local supervisor of a run that has recorded its end leave, so that no process is left."""
        deadline = time.monotonic() + _EXIT_PATIENCE_S
        while is_locked(self.dir.lock) and time.monotonic() < deadline:
            time.sleep(0.02)

    def cancel(self) -> RunStatus:
        """Ask the run to save its state and end for good; return where it stood. An ended run stays as it is.

        Raises:
            SchedulerError: the scheduler refused, or cannot be reached.
        """
        status = self.status()
        if status.state.ended:
            return status
        backend, job_id = self._job()
        self.dir.cancel_request.touch()
        try:
            backend.cancel(job_id, self.dir)
            if status.state is RunState.PENDING and self.status().state is RunState.CANCELLED:
                # It never started, so nobody else writes down its end, and Slurm forgets it.
                self.dir.log_event(
                    "finished", status.attempt or 0, state="CANCELLED", exit_code=0, cause=None
                )
        except SchedulerError:
            # It may have ended by itself in this moment, which is as good.
            if not self.status().state.ended:
                raise
        return status

    def requeue(self) -> RunStatus:
        """Ask the run to save its state and go on in a new attempt; return where it stood.

        Raises:
            SpecError: the run is not running.
            SchedulerError: the scheduler refused, or cannot be reached.
        """
        status = self.status()
        if status.state is not RunState.RUNNING:
            raise SpecError(f"Run {self.run_id} is {status.state}; only a running one can be requeued.")
        backend, job_id = self._job()
        backend.requeue(job_id, self.dir)
        return status

    def lift_hold(self) -> bool:
        """Let the requeued job start without its delay, and return whether the scheduler agreed."""
        backend, job_id = self._job()
        return backend.lift_hold(job_id)

    def _job(self) -> tuple[Backend, str]:
        record = read_record(self.dir)
        if record.job_id is None:
            raise RunNotFound(f"Run {self.dir.path} has never been submitted: its record names no job.")
        return _backend_of(record, self.environ), record.job_id


def ended_well(status: RunStatus) -> RunStatus:
    """The status of a run that has ended, where that was with success.

    Raises:
        RunFailed: it was not.
    """
    if status.state is RunState.COMPLETED:
        return status
    if status.state is RunState.CANCELLED:
        raise RunFailed(f"Run {status.run_id} was cancelled.")
    raise RunFailed(f"Run {status.run_id} failed: {status.cause}. Log: {status.log}")


def statuses(runs: Sequence[Run]) -> list[RunStatus]:
    """Where runs stand; each scheduler is asked once for all of them."""
    records = [read_record(run.dir) for run in runs]
    views: dict[int, JobView] = {}
    for name in ("slurm", "local"):
        asked = [i for i, record in enumerate(records) if record.backend == name and not record.finished]
        if asked:
            backend = _backend_of(records[asked[0]], runs[asked[0]].environ)
            answers = backend.look([(records[i].job_id or "", runs[i].dir) for i in asked])
            views |= dict(zip(asked, answers, strict=True))
    return [settle(record, views.get(i)) for i, record in enumerate(records)]


def find_run(run: str, runs_dir: Path, environ: Mapping[str, str]) -> Run:
    """The run of that id in `runs_dir`, or with that folder.

    Raises:
        RunNotFound: there is none.
    """
    for folder in (runs_dir / run, Path(run).absolute()):
        try:
            found = RunDir(folder).spec.is_file()
        except OSError as error:
            raise RunNotFound(f"The run {run!r} cannot be looked at: {_trouble(error)}.") from error
        if found:
            return Run(RunDir(folder.absolute()), environ)
    from difflib import get_close_matches

    close = get_close_matches(run, [known.run_id for known in list_runs(runs_dir, environ)], 1)
    hint = (
        f"Did you mean {close[0]!r}?" if close else "`hpctrain list` shows all; --runs-dir looks elsewhere."
    )
    raise RunNotFound(f"There is no run {run!r}, neither in {str(runs_dir)!r} nor as a folder. {hint}")


def list_runs(runs_dir: Path, environ: Mapping[str, str]) -> list[Run]:
    """All runs in `runs_dir`, the one submitted first comes first; those that may not be seen are left out.

    Raises:
        RunNotFound: the folder cannot be read.
    """
    try:
        folders = [folder.absolute() for folder in runs_dir.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunNotFound(f"The runs (--runs-dir) cannot be listed: {_trouble(error)}.") from error
    submitted: list[tuple[float, str, Path]] = []
    for folder in folders:
        with suppress(OSError):
            submitted.append((RunDir(folder).spec.stat().st_mtime, folder.name, folder))
    return [Run(RunDir(folder), environ) for _, _, folder in sorted(submitted)]


def _trouble(error: OSError) -> str:
    return f"{error.strerror}: {error.filename!r}"


def _backend_of(record: Record, environ: Mapping[str, str]) -> Backend:
    return open_backend("slurm" if record.backend == "slurm" else "local", environ)
