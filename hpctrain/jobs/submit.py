"""The second half of a submission: what was decided is written and handed to the scheduler."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.files import is_locked, replace_files, try_lock, write_atomic
from hpctrain.jobs.backends import SubmissionUnclear
from hpctrain.jobs.options import SubmitOptions
from hpctrain.jobs.prepare import Submission, prepare
from hpctrain.jobs.runs import Run, statuses
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir

#: A supervisor that has recorded its end still has to leave, and a look at the lock takes a moment.
_LOCK_PATIENCE_S = 5.0


def hand_over(submission: Submission, functions: Sequence[bytes] = ()) -> Run:
    """Write the run folder and submit the job; of a job array, also the folder of each task.

    Args:
        submission: the job.
        functions: what the ranks call, pickled, for the run or for each task; none where they run a script.

    Raises:
        SpecError: the folder cannot be written, or its run is still going.
        SchedulerError: the scheduler refused, or cannot be reached.
    """
    spec = submission.spec
    folder = _folder(spec)
    run = Run(folder, submission.environ)
    tasks = spec.tasks()
    try:
        with (
            _claimed(run, list(map(_folder, tasks))) as lock,
            submission.snapshot.taken(folder) if submission.snapshot else nullcontext() as code,
        ):
            spec, *tasks = (replace(part, code=code) for part in (spec, *tasks))
            function_of = dict(zip((part.run_dir for part in tasks or [spec]), functions, strict=False))
            for part in (*tasks, spec):
                _write(part, submission.script if part is spec else None, function_of.get(part.run_dir))
            write_atomic(folder.git_ignore, "*\n", durable=False)
            # Slurm has to have done so before: it would count the job with those that wait.
            submission.foretell()
            job_id = submission.backend.submit(spec, folder, lock)
            for task in tasks:
                _record(task, f"{job_id}_{task.array_task}")
            # Last: whoever reads this may rely on all the others.
            _record(spec, job_id)
    except OSError as error:
        raise SpecError(
            f"The run folder {str(folder.path)!r} (--run-dir) cannot be written: {error.strerror}. "
            "Choose another."
        ) from error
    return run


def submit(script: str | os.PathLike[str], args: Sequence[str] = (), **options: Unpack[SubmitOptions]) -> Run:
    """Submit a script as a run, as `hpctrain submit` does. Files of options count here, too.

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
    log = logging.getLogger("hpctrain")
    for note in submission.notes:
        log.warning(note)
    run = hand_over(submission)
    for prospect in submission.prospects:
        log.info(prospect)
    return run


def _folder(spec: JobSpec) -> RunDir:
    return RunDir(Path(spec.run_dir))


def _write(spec: JobSpec, script: str | None, function: bytes | None) -> None:
    """Write what a run folder holds before its job is submitted."""
    folder = _folder(spec)
    folder.logs.mkdir(parents=True, exist_ok=True)
    folder.cancel_request.unlink(missing_ok=True)
    files = {folder.spec: spec.text(), folder.job_script: script, folder.function: function}
    # An array has thousands of tasks, and waiting for the disk after each would take minutes.
    durable = spec.array_task is None
    replace_files({path: it for path, it in files.items() if it is not None}, durable=durable)


def _record(spec: JobSpec, job_id: str) -> None:
    folder = _folder(spec)
    attempt = max(folder.attempts(), default=-1) + 1
    try:
        folder.log_event("submitted", attempt, job_id=job_id, backend=spec.backend)
    except OSError as error:
        raise SubmissionUnclear(
            f"Job {job_id} is submitted, but that cannot be recorded in {str(folder.events)!r}: "
            f"{error.strerror}. See to the file system, and end the job where it should not go on."
        ) from error


@contextmanager
def _claimed(run: Run, tasks: Sequence[RunDir]) -> Iterator[int]:
    """Hold the lock of a run folder, made if need be, in which nothing is going on that is submitted now.

    Folders that were made for a submission that failed are taken away again, but not from under a job that
    may be queued.
    """
    made = [folder for folder in (*tasks, run.dir) if not folder.path.exists()]
    run.dir.path.mkdir(parents=True, exist_ok=True)
    lock = _lock(run)
    try:
        _refuse_going([Run(task, run.environ) for task in tasks] or [run])
        os.ftruncate(lock, 0)
        yield lock
    except Exception as error:
        # Other ends, such as Ctrl-C, may come while the scheduler takes the job.
        if not isinstance(error, SubmissionUnclear):
            for folder in made:
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


def _refuse_going(runs: Sequence[Run]) -> None:
    """The lock, held by us, tells of a local run; whether a job is in Slurm's queue, only Slurm can tell."""
    recorded = [run for run in runs if run.dir.events.exists()]
    if not recorded:
        return
    from hpctrain.jobs.environment import outer_environment
    from hpctrain.jobs.lease import is_alive, newest_lease
    from hpctrain.jobs.states import RunState

    for run, status in zip(recorded, statuses(recorded), strict=True):
        if status.state is RunState.UNKNOWN and status.job_id is not None:
            raise SchedulerError(
                f"Whether run {run.run_id} is still going cannot be told: {status.words}. "
                "Submit again when Slurm answers."
            )
        is_going_here = run.dir.array is not None and is_locked(run.dir.lock)
        if is_going_here or (status.backend == "slurm" and not status.state.ended):
            raise _still_going(run)
    for run in recorded:
        # The record knows what was submitted; the lease tells of any supervisor that lives.
        held = newest_lease(run.dir)
        if held is not None and is_alive(held, outer_environment(run.environ)):
            raise _still_going(run, f", as job {held.holder.job_id}")


def _still_going(run: Run, job: str = "") -> SpecError:
    return SpecError(
        f"The run in {str(run.dir.path)!r} (--run-dir) is still going{job}. "
        "Wait for it, cancel it, or choose another folder."
    )


def _remove_traces(folder: RunDir) -> None:
    for path in (folder.spec, folder.job_script, folder.slurm_log, folder.lock, folder.git_ignore):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.logs.rmdir()
    with suppress(OSError):
        folder.path.rmdir()
