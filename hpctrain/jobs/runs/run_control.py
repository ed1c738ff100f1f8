"""Requests to runs: cancel and requeue. Each scheduler receives one request for all tasks of a job array."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpctrain.errors import RunNotFound, SchedulerError, SpecError
from hpctrain.jobs.backends import open_backend
from hpctrain.jobs.backends.backend import Backend
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.jobs.runs.status_poller import StatusPoller
from hpctrain.jobspec.job_spec import BackendName
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.records.run_record import read_run_record
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import JobRecord, RunState


def cancel(run: RunDir, environ: Mapping[str, str]) -> RunStatus:
    status, statuses = _query_status(run, environ)
    if status.state.ended:
        return status
    # Tasks without a job were never submitted.
    going = [
        job for job, report in statuses.items() if not report.state.ended and report.job_id is not None
    ] or [run]
    waiting = [job for job, report in statuses.items() if report.state is RunState.PENDING]
    requests = _jobs_by_backend(going, environ)
    asked_now = [job for job in going if not job.cancel_request.exists()]
    for job in asked_now:
        job.cancel_request.touch(0o644)
    try:
        for backend, jobs in requests:
            backend.cancel(jobs)
        for job, report in zip(waiting, StatusPoller(waiting, environ).poll(), strict=True):
            if report.state is RunState.CANCELLED:
                # No supervisor exists to record the end, and Slurm forgets the job.
                job.log_event("finished", report.attempt or 0, state="CANCELLED", exit_code=0, cause=None)
    except SchedulerError:
        # The run may have ended in the meantime, which is acceptable.
        if not StatusPoller([run], environ).poll()[0].state.ended:
            # A rejected request must not take effect at the next preemption.
            for job in asked_now:
                job.cancel_request.unlink(missing_ok=True)
            raise
    return status


def requeue(run: RunDir, environ: Mapping[str, str]) -> RunStatus:
    status, statuses = _query_status(run, environ)
    running = [job for job, report in statuses.items() if report.state is RunState.RUNNING]
    held = [job for job, report in statuses.items() if report.held]
    if not running and not held:
        hint = "To continue a run that has ended, use `hpctrain resume`."
        if status.state is RunState.PENDING:
            hint = "It is in the queue already, and starts by itself from its newest checkpoint, if any."
        raise SpecError(
            f"Run {run.run_id} is {status.state}. Only a run that is RUNNING can be requeued. {hint}"
        )
    if running and not _is_supervised(run):
        raise SpecError(
            f"Run {run.run_id} runs without hpctrain in the job (--template plain), so its ranks cannot be "
            f"asked to save. To restart them from their own checkpoint: scontrol requeue {status.job_id}"
        )
    for backend, jobs in _jobs_by_backend(held, environ):
        backend.release_hold(jobs)
    for job in running:
        job.request_requeue(statuses[job].attempt or 0)
    try:
        preempt(running, environ)
    except SchedulerError:
        for job in running:
            job.requeue_request.unlink(missing_ok=True)
        raise
    return status


def preempt(running: Iterable[RunDir], environ: Mapping[str, str]) -> None:
    """Send the ranks of running runs the preemption signal."""
    for backend, jobs in _jobs_by_backend(running, environ):
        backend.requeue(jobs)


def _query_status(run: RunDir, environ: Mapping[str, str]) -> tuple[RunStatus, dict[RunDir, RunStatus]]:
    """Return the status of each task of the run, or of the run itself if it has no tasks."""
    jobs = [run.task(index) for index in run.tasks()] or [run]
    status, *statuses = StatusPoller([run, *jobs], environ).poll()
    return status, dict(zip(jobs, statuses, strict=True))


def _jobs_by_backend(
    runs: Iterable[RunDir], environ: Mapping[str, str]
) -> list[tuple[Backend, list[JobRecord]]]:
    jobs: dict[BackendName, list[JobRecord]] = {}
    for run in runs:
        record = read_run_record(run)
        if record.backend is None or record.job is None:
            raise RunNotFound(f"Run {run.path} has never been submitted: its record contains no job id.")
        jobs.setdefault(record.backend, []).append(record.job)
    return [(open_backend(name, environ), jobs_of_backend) for name, jobs_of_backend in jobs.items()]


def _is_supervised(run: RunDir) -> bool:
    try:
        return load_spec((run.array or run).spec).supervised
    except SpecError:
        return True
