"""A run, seen from the login node: look at it, wait for it, end it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import RunFailed, RunNotFound, WaitTimeout
from hpctrain.files import is_locked
from hpctrain.jobs.record import read_record
from hpctrain.rundir import RunDir

# Who submits a run and leaves needs nothing of what looks at runs: it is imported where it is used.
if TYPE_CHECKING:
    from hpctrain.jobs.doubt import Doubt
    from hpctrain.jobs.status import RunStatus
    from hpctrain.jobs.watch import Watcher

#: A supervisor has nothing to do after it has recorded the end.
_EXIT_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Run:
    """A run that has been submitted. Holds no state: every question is asked anew."""

    dir: RunDir
    #: Variables that the scheduler's commands run under. Some may be secret.
    environ: Mapping[str, str] = field(repr=False)

    @property
    def run_id(self) -> str:
        return self.dir.run_id

    @property
    def job_id(self) -> str | None:
        """The scheduler's id of the job that was submitted last."""
        return read_record(self.dir).job_id

    def log_path(self, rank: int = 0) -> Path | None:
        """The rank's log in the newest attempt; None before the first."""
        attempts = self.dir.attempts()
        return self.dir.rank_log(attempts[-1], rank) if attempts else None

    def status(self) -> RunStatus:
        """Where the run stands now."""
        return statuses([self])[0]

    def tasks(self) -> list[Run]:
        """The tasks of a job array, each a run of its own; none where this is a single run."""
        return [Run(self.dir.task(index), self.environ) for index in self.dir.tasks()]

    def watch(self) -> Iterator[RunStatus]:
        """Yield the status again and again, the last one when the run has ended.

        Delays that Slurm puts on the requeued job are lifted on the way.
        """
        yield from self._watch(None)

    def wait(self, timeout: float | None = None, unknown_limit: float | None = None) -> RunStatus:
        """Wait until the run has ended with success.

        Args:
            timeout: seconds to wait at most; None waits as long as it takes.
            unknown_limit: see `wait_for_end`.

        Raises:
            RunFailed: it ended otherwise.
            WaitTimeout: it has not ended yet.
            SchedulerError: nobody can say any more where it stands.
        """
        return ended_well(self.wait_for_end(timeout, unknown_limit))

    def wait_for_end(
        self,
        timeout: float | None = None,
        unknown_limit: float | None = None,
        tell: Callable[[str], object] | None = None,
    ) -> RunStatus:
        """Wait until the run has ended, however that is.

        Args:
            timeout: seconds to wait at most; None waits as long as it takes.
            unknown_limit: seconds to wait at most while the scheduler gives no sure answer and the run writes
                nothing; None is an hour.
            tell: gets a sentence now and then while nobody can say where the run stands; None logs it.

        Raises:
            WaitTimeout: it has not ended yet.
            SchedulerError: nobody can say any more where it stands.
        """
        import logging

        from hpctrain.jobs.doubt import UNKNOWN_LIMIT_S, Doubt

        doubt = Doubt(UNKNOWN_LIMIT_S if unknown_limit is None else unknown_limit)
        tell = tell or logging.getLogger("hpctrain").warning
        for status in self._watch(timeout, doubt):
            if words := doubt.words(status):
                tell(f"Waiting for run {self.run_id}: {words}")
        if not status.state.ended:
            raise WaitTimeout(
                f"Run {self.run_id} has not ended within {timeout:g} s: it is {status.state}. "
                "It goes on; wait again, or cancel it."
            )
        self.await_exit()
        return status

    def _watch(self, limit_s: float | None, doubt: Doubt | None = None) -> Iterator[RunStatus]:
        """Yield the status until the run has ended or the time is up, and when that of a doubt is."""
        deadline = time.monotonic() + (math.inf if limit_s is None else limit_s)
        watcher = _watcher([self])
        while True:
            (status,) = watcher.look()
            yield status
            left = deadline - time.monotonic()
            if status.state.ended or left <= 0:
                return
            if status.held:
                self.lift_hold()
            pause = min(watcher.poll_s, left)
            time.sleep(min(pause, doubt.left_s) if doubt is not None and doubt.left_s else pause)

    def await_exit(self) -> None:
        """Let the local supervisor of a run that has recorded its end leave, so that no process is left."""
        deadline = time.monotonic() + _EXIT_PATIENCE_S
        while is_locked(self.dir.lock) and time.monotonic() < deadline:
            time.sleep(0.02)

    def cancel(self) -> RunStatus:
        """Ask the run to save its state and end for good; return where it stood. An ended run stays as it is.

        Of a job array, every task is asked.

        Raises:
            SchedulerError: the scheduler refused, or cannot be reached.
        """
        from hpctrain.jobs import steer

        return steer.cancel(self.dir, self.environ)

    def requeue(self) -> RunStatus:
        """Ask the run to save its state and go on in a new attempt; return where it stood.

        Of a job array, every task that is running is asked.

        Raises:
            SpecError: the run is not running.
            SchedulerError: the scheduler refused, or cannot be reached.
        """
        from hpctrain.jobs import steer

        return steer.requeue(self.dir, self.environ)

    def lift_hold(self) -> bool:
        """Let the requeued job start without its delay, and return whether the scheduler agreed."""
        from hpctrain.jobs import steer

        return steer.lift_hold(self.dir, self.environ)


def ended_well(status: RunStatus) -> RunStatus:
    """The status of a run that has ended, where that was with success.

    Raises:
        RunFailed: it was not.
    """
    from hpctrain.jobs.states import RunState

    if status.state is RunState.COMPLETED:
        return status
    if status.state is RunState.CANCELLED:
        raise RunFailed(f"Run {status.run_id} was cancelled.")
    raise RunFailed(f"Run {status.run_id} failed: {status.cause}. Log: {status.log}")


def statuses(runs: Sequence[Run]) -> list[RunStatus]:
    """Where runs stand; each scheduler is asked once for all of them."""
    return _watcher(runs).look() if runs else []


def _watcher(runs: Sequence[Run]) -> Watcher:
    from hpctrain.jobs.watch import Watcher

    return Watcher([run.dir for run in runs], runs[0].environ)


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
    for folder in (runs_dir / run, Path(run)):
        if (path := RunDir(folder).checkpoints).is_dir():
            raise RunNotFound(
                f"{str(folder)!r} has checkpoints, but was not submitted so far: `hpctrain submit --run-dir` "
                f"goes on from them, `hpctrain checkpoints` lists what lies in {str(path)!r}."
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
