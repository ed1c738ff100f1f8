"""Asking runs to end or to go on elsewhere: each scheduler is asked once for all tasks of a job array."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TypeVar

from hpctrain.errors import RunNotFound, SchedulerError, SpecError
from hpctrain.files import write_atomic
from hpctrain.jobs.backends import Backend, open_backend
from hpctrain.jobs.record import Job, read_record
from hpctrain.jobs.spec import BackendName
from hpctrain.jobs.states import RunState
from hpctrain.jobs.status import RunStatus
from hpctrain.jobs.watch import Watcher
from hpctrain.rundir import RunDir

_Answer = TypeVar("_Answer")


def cancel(run: RunDir, environ: Mapping[str, str]) -> RunStatus:
    """Ask the run to save its state and end for good. See `Run.cancel`."""
    status, parts = _look(run, environ)
    if status.state.ended:
        return status
    going = [part for part, its in parts.items() if not its.state.ended]
    waiting = [part for part, its in parts.items() if its.state is RunState.PENDING]
    jobs = _jobs_of(going)
    asked_now = [part for part in going if not part.cancel_request.exists()]
    for part in asked_now:
        part.cancel_request.touch()
    try:
        _ask(jobs, environ, lambda backend, these: backend.cancel(these))
        for part, now in zip(waiting, Watcher(waiting, environ).look(), strict=True):
            if now.state is RunState.CANCELLED:
                # No supervisor is there to write down its end, and Slurm forgets it.
                part.log_event("finished", now.attempt or 0, state="CANCELLED", exit_code=0, cause=None)
    except SchedulerError:
        # It may have ended by itself in this moment, which is as good.
        if not Watcher([run], environ).look()[0].state.ended:
            # What was refused must not come to pass at the next preemption.
            for part in asked_now:
                part.cancel_request.unlink(missing_ok=True)
            raise
    return status


def requeue(run: RunDir, environ: Mapping[str, str]) -> RunStatus:
    """Ask the run to save its state and go on in a new attempt. See `Run.requeue`."""
    status, parts = _look(run, environ)
    running = [part for part, its in parts.items() if its.state is RunState.RUNNING]
    if not running:
        raise SpecError(f"Run {run.run_id} is {status.state}; only a running one can be requeued.")
    # The ranks are told by the signal of a preemption, after which they would be ended soon.
    for part in running:
        with suppress(OSError):  # then they take the time for as short as that
            write_atomic(part.requeue_request, f"{parts[part].attempt}\n", durable=False)
    try:
        preempt(running, environ)
    except SchedulerError:
        for part in running:
            part.requeue_request.unlink(missing_ok=True)
        raise
    return status


def preempt(running: Iterable[RunDir], environ: Mapping[str, str]) -> None:
    """Give the ranks of running runs the signal of a preemption.

    Raises:
        SchedulerError: they could not be told.
    """
    _ask(_jobs_of(running), environ, lambda backend, these: backend.requeue(these))


def lift_hold(run: RunDir, environ: Mapping[str, str]) -> bool:
    """Let the requeued job start without its delay. See `Run.lift_hold`."""
    held = [run]
    if run.tasks():
        held = [part for part, its in _look(run, environ)[1].items() if its.held]
    return all(_ask(_jobs_of(held), environ, lambda backend, these: backend.lift_hold(these)))


def _look(run: RunDir, environ: Mapping[str, str]) -> tuple[RunStatus, dict[RunDir, RunStatus]]:
    """Where the run stands, and where each of its tasks does, or the run itself where it has none."""
    parts = [run.task(index) for index in run.tasks()] or [run]
    status, *each = Watcher([run, *parts], environ).look()
    return status, dict(zip(parts, each, strict=True))


def _jobs_of(runs: Iterable[RunDir]) -> dict[BackendName, list[Job]]:
    jobs: dict[BackendName, list[Job]] = {}
    for run in runs:
        record = read_record(run)
        if record.backend is None or record.job is None:
            raise RunNotFound(f"Run {run.path} has never been submitted: its record names no job.")
        jobs.setdefault(record.backend, []).append(record.job)
    return jobs


def _ask(
    jobs: Mapping[BackendName, list[Job]],
    environ: Mapping[str, str],
    request: Callable[[Backend, list[Job]], _Answer],
) -> list[_Answer]:
    """Make one request of each backend."""
    return [request(open_backend(name, environ), these) for name, these in jobs.items()]
