"""A submission: decided and checked first, then written and handed to the scheduler."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.files import try_lock, write_atomic
from hpctrain.jobs.backends import Backend, choose_backend
from hpctrain.jobs.lint import check_files
from hpctrain.jobs.options import SubmitOptions, build_spec, check_names
from hpctrain.jobs.render import render
from hpctrain.jobs.runs import Run
from hpctrain.jobs.spec import JobSpec
from hpctrain.jobs.states import RunState
from hpctrain.rundir import RunDir

#: A supervisor that has recorded its end still has to leave, and a look at the lock takes a moment.
_LOCK_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Submission:
    """A job that has passed every check. Nothing has been written yet."""

    spec: JobSpec
    #: The batch script, exactly as it will be submitted.
    script: str
    #: What the user should know, a line each.
    notes: tuple[str, ...]
    backend: Backend
    environ: Mapping[str, str]

    def submit(self) -> Run:
        """Write the run folder and hand the job over.

        Raises:
            SpecError: the folder cannot be written, or its run is still going.
            SchedulerError: the scheduler refused, or cannot be reached.
        """
        run = Run(RunDir(Path(self.spec.run_dir)), self.environ)
        with _claimed(run) as lock:
            folder = run.dir
            folder.logs.mkdir(exist_ok=True)
            folder.cancel_request.unlink(missing_ok=True)
            self.spec.save(folder.spec)
            write_atomic(folder.job_script, self.script)
            attempt = max(folder.attempts(), default=-1) + 1
            job_id = self.backend.submit(self.spec, folder, lock)
            folder.log_event("submitted", attempt, job_id=job_id, backend=self.spec.backend)
        return run


def prepare(
    script: str | os.PathLike[str],
    args: Sequence[str],
    options: SubmitOptions,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    python: str,
) -> Submission:
    """Decide and check everything about a job; nothing is written and nothing submitted.

    Raises:
        SpecError: the job cannot be done as asked.
        SchedulerError: Slurm was asked for by name and does not answer.
    """
    check_names(options)
    backend, notes = choose_backend(options.get("backend", "auto"), environ)
    spec = build_spec(script, args, options, backend=backend.name, cwd=cwd, python=python)
    check_files(spec)
    notes += backend.check(spec)
    return Submission(spec, render(spec), tuple(notes), backend, environ)


def submit(script: str | os.PathLike[str], args: Sequence[str] = (), **options: Unpack[SubmitOptions]) -> Run:
    """Submit a script as a run, as `hpctrain submit` does.

    Args:
        script: the Python script that every rank runs.
        args: its command-line arguments.
        **options: see `SubmitOptions`; they are named as on the command line.

    Raises:
        SpecError: the job cannot be done as asked.
        SchedulerError: the scheduler refused, or cannot be reached.
    """
    import logging

    submission = prepare(
        script, args, options, environ=dict(os.environ), cwd=Path.cwd(), python=sys.executable
    )
    for note in submission.notes:
        logging.getLogger("hpctrain").warning(note)
    return submission.submit()


@contextmanager
def _claimed(run: Run) -> Iterator[int]:
    """Hold the lock of a run folder, made if need be, in which nothing is going on.

    A folder that was made for a submission that failed is taken away again.
    """
    folder = run.dir
    existed = folder.path.exists()
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = _lock(run)
    except OSError as error:
        raise SpecError(
            f"The run folder {str(folder.path)!r} (--run-dir) cannot be written: {error.strerror}. "
            "Choose another."
        ) from error
    try:
        _refuse_going(run)
        os.ftruncate(lock, 0)
        yield lock
    except BaseException:
        if not existed:
            _remove_traces(folder)
        raise
    finally:
        os.close(lock)


def _lock(run: Run) -> int:
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while (lock := try_lock(run.dir.lock)) is None:
        if not run.status().state.ended or time.monotonic() > deadline:
            raise _still_going(run)
        time.sleep(0.05)
    return lock


def _refuse_going(run: Run) -> None:
    """The lock tells of a local run; whether a job is in Slurm's queue, only Slurm can tell."""
    if not run.dir.events.exists():
        return
    status = run.status()
    if status.state is RunState.UNKNOWN and status.job_id is not None:
        raise SchedulerError(
            f"Whether run {run.run_id} is still going cannot be told: {status.words}. "
            "Submit again when Slurm answers."
        )
    if status.backend == "slurm" and not status.state.ended:
        raise _still_going(run)


def _still_going(run: Run) -> SpecError:
    return SpecError(
        f"The run in {str(run.dir.path)!r} (--run-dir) is still going. "
        "Wait for it, cancel it, or choose another folder."
    )


def _remove_traces(folder: RunDir) -> None:
    for path in (folder.spec, folder.job_script, folder.slurm_log, folder.lock):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.logs.rmdir()
    with suppress(OSError):
        folder.path.rmdir()
