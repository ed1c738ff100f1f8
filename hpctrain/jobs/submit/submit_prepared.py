"""Write the run folder of a prepared submission, and submit the job to the scheduler."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from msgspec.structs import replace

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.files import is_locked, make_folder, replace_files, try_lock, write_atomic
from hpctrain.jobs.backends.backend import SubmissionUnconfirmed
from hpctrain.jobs.options.option_table import SubmitOptions
from hpctrain.jobs.runs.run import Run, query_statuses
from hpctrain.jobs.submit.prepare import PreparedSubmission, prepare_submission
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.launcher import ProgramKind
from hpctrain.jobspec.redaction import redact_args
from hpctrain.records.run_record import read_run_record
from hpctrain.rundir import STOPPED_EARLY, RunDir
from hpctrain.slurm.environment import loaded_modules, strip_job_env
from hpctrain.slurm.states import RunState

if TYPE_CHECKING:
    from hpctrain.sweeps.sweep_record import SweepRecord

#: Seconds: a supervisor that has recorded the end may not have exited yet.
_LOCK_TIMEOUT_S = 5.0


def submit_prepared(
    submission: PreparedSubmission, functions: Sequence[bytes] = (), sweep: SweepRecord | None = None
) -> tuple[Run, str]:
    """Write the run folder, with a folder per task of a job array, and submit the job. Return also its id."""
    spec = submission.spec
    folder = _folder(spec)
    run = Run(folder, submission.environ)
    tasks = spec.tasks()
    if sweep is not None:
        tasks = [replace(task, args=sweep.trial_args(task.array_task or 0)) for task in tasks]
    try:
        with (
            _claim_run(run, list(map(_folder, tasks))) as lock,
            submission.snapshot.copied_to(Path(spec.code.copy))
            if submission.snapshot and spec.code
            else nullcontext(),
            _written_sweep(folder, sweep) if sweep else nullcontext(),
        ):
            if folder.spec.exists():
                # If Slurm rejects the job, the files of the earlier submission are unchanged.
                submission.raise_refusal()
            function_of = dict(zip((job.run_dir for job in tasks or [spec]), functions, strict=False))
            for job in (*tasks, spec):
                _write(job, submission.script if job is spec else None, function_of.get(job.run_dir))
            if submission.batch is not None:
                text = submission.batch.text.encode(errors="surrogateescape")
                replace_files({folder.batch_script: text}, private=True)
            write_atomic(folder.git_ignore, "*\n", durable=False)
            submission.raise_refusal()
            job_id = submission.backend.submit(spec, folder, lock)
            modules = loaded_modules(submission.environ)
            for task in tasks:
                _record(task, f"{job_id}_{task.array_task}", modules)
            # Written last: readers of this record can rely on all other records.
            _record(spec, job_id, modules)
            return run, job_id
    except OSError as error:
        raise SpecError(
            f"Cannot write to the run folder {str(folder.path)!r} (--run-dir): {error.strerror}. "
            "Choose another folder."
        ) from error


def submit(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    program: ProgramKind = "script",
    **options: Unpack[SubmitOptions],
) -> Run:
    """Submit a program as a run, as `hpctrain submit` does; option files apply, too.

    Args:
        script: the Python script that every rank runs; the name of a module, or a command.
        args: its command-line arguments.
        program: the kind of `script`: `"script"`, `"module"` as for `python -m`, or `"command"`.
        **options: see `SubmitOptions`; the names are those of the command-line options, with underscores.

    Raises:
        SpecError: the job cannot run as requested.
        SchedulerError: the scheduler refused or cannot be reached.
    """
    import logging

    submission = prepare_submission(
        script,
        args,
        options,
        environ=dict(os.environ),
        cwd=Path.cwd(),
        python=sys.executable,
        program=program,
    )
    log = logging.getLogger("hpctrain")
    for note in submission.notes:
        log.warning(note)
    run, _ = submit_prepared(submission)
    for prospect in submission.forecast:
        log.info(prospect)
    return run


def _folder(spec: JobSpec) -> RunDir:
    return RunDir(Path(spec.run_dir))


def _write(spec: JobSpec, script: str | None, function: bytes | None) -> None:
    folder = _folder(spec)
    make_folder(folder.path)
    make_folder(folder.logs)
    folder.cancel_request.unlink(missing_ok=True)
    files = {folder.spec: spec.text(), folder.job_script: script, folder.function: function}
    # An array may have thousands of tasks: an fsync per task would take minutes.
    durable = spec.array_task is None
    replace_files(
        {path: content for path, content in files.items() if content is not None},
        durable=durable,
        private=True,
    )


@contextmanager
def _written_sweep(folder: RunDir, sweep: SweepRecord) -> Iterator[None]:
    """Write the record of a sweep. If the block fails to submit its trials, restore the earlier record."""
    earlier = folder.sweep.read_text() if folder.sweep.exists() else None
    write_atomic(folder.sweep, sweep.text(), private=True)
    try:
        yield
    except Exception as error:
        if earlier is not None and not isinstance(error, SubmissionUnconfirmed):
            write_atomic(folder.sweep, earlier, private=True)
        raise


def _record(spec: JobSpec, job_id: str, modules: Sequence[str]) -> None:
    folder = _folder(spec)
    attempt = max(folder.attempts(), default=-1) + 1
    fields = {"args": redact_args(spec.args)} if spec.args else {}
    try:
        folder.log_event("submitted", attempt, job_id=job_id, backend=spec.backend, modules=modules, **fields)
    except OSError as error:
        raise SubmissionUnconfirmed(
            f"Job {job_id} was submitted, but cannot be recorded in {str(folder.events)!r}: "
            f"{error.strerror}. Check the file system, and cancel the job if it should not run."
        ) from error


@contextmanager
def _claim_run(run: Run, tasks: Sequence[RunDir]) -> Iterator[int]:
    """Hold the lock of a run folder, creating the folder if needed; reject a run that is still active."""
    made = [folder for folder in (*tasks, run.dir) if not folder.path.exists()]
    make_folder(run.dir.path)
    lock = _lock(run)
    try:
        _refuse_active([Run(task, run.environ) for task in tasks] or [run])
        os.ftruncate(lock, 0)
        yield lock
    except Exception as error:
        # Other exceptions, such as Ctrl-C, may occur while the scheduler accepts the job.
        if not isinstance(error, SubmissionUnconfirmed):
            for folder in made:
                _rollback(folder)
        raise
    finally:
        os.close(lock)


def _lock(run: Run) -> int:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while (lock := try_lock(run.dir.lock)) is None:
        if not run.status().state.ended or time.monotonic() > deadline:
            raise _active_job_error(run)
        time.sleep(0.05)
    return lock


def _refuse_active(runs: Sequence[Run]) -> None:
    """Reject a run that is still active. The held lock excludes local runs; Slurm runs require a query."""
    recorded = [run for run in runs if run.dir.events.exists()]
    if not recorded:
        return
    from hpctrain.records.lease import is_lease_alive, newest_lease

    for run, status in zip(recorded, query_statuses(recorded), strict=True):
        if status.state is RunState.UNKNOWN and status.job_id is not None:
            raise SchedulerError(
                f"Cannot determine whether run {run.run_id} is still active: {status.words}. "
                "Submit again when Slurm responds."
            )
        is_going_here = run.dir.array is not None and is_locked(run.dir.lock)
        if is_going_here or (status.backend == "slurm" and not status.state.ended):
            raise _active_job_error(run)
    for run in recorded:
        # The record names the submitted job; the lease shows if a supervisor is alive.
        held = newest_lease(run.dir)
        if held is not None and is_lease_alive(run.dir, held, strip_job_env(run.environ)):
            raise _active_job_error(run, f", as job {held.holder.job_id}")
        if run.dir.cancel_request.exists() and read_run_record(run.dir).finished is None:
            # The supervisor was killed before it recorded the end. The cancel request will be removed.
            attempt, reason = max(run.dir.attempts(), default=0), run.dir.early_stop_reason()
            state, note = (STOPPED_EARLY, {"note": reason}) if reason else ("CANCELLED", {})
            run.dir.log_event("finished", attempt, state=state, exit_code=0, cause=None, **note)


def _active_job_error(run: Run, job: str = "") -> SpecError:
    return SpecError(
        f"The run in {str(run.dir.path)!r} (--run-dir) is still active{job}. Wait for the run, cancel it, "
        "or choose another folder."
    )


def _rollback(folder: RunDir) -> None:
    files = (folder.spec, folder.job_script, folder.function, folder.slurm_log, folder.lock)
    for path in (*files, folder.batch_script, folder.git_ignore, folder.sweep):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.logs.rmdir()
    with suppress(OSError):
        folder.path.rmdir()
