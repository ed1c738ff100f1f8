"""Jobs on this machine: the same job script and supervisor, as a detached process."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.files import is_locked
from hpctrain.jobs.array import Array
from hpctrain.jobs.backends import Outlook
from hpctrain.jobs.environment import outer_environment
from hpctrain.jobs.record import Job, read_record
from hpctrain.jobs.site.facts import Site
from hpctrain.jobs.spec import BackendName, JobSpec
from hpctrain.jobs.states import JobView, RunState
from hpctrain.rundir import RunDir

#: Each rank is a process with PyTorch in it: beyond this a laptop is only kept busy.
_RANKS_PER_CPU, _LEAST_RANKS = 4, 32
#: The number of a supervisor's process is written within milliseconds of its start.
_NUMBER_LIMIT_S = 2.0
#: A supervisor starts the ranks within a second, where what the job script readies takes no longer.
_START_LIMIT_S = 5.0


class LocalBackend:
    """Jobs on this machine. A run is alive as long as its supervisor holds the run's lock."""

    name: ClassVar[BackendName] = "local"

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def check(self, spec: JobSpec, script: str, profile: Site) -> Outlook:  # noqa: ARG002 (no site here)
        at_once = _tasks_at_once(spec)
        most = max(_LEAST_RANKS, _RANKS_PER_CPU * (os.cpu_count() or 1))
        if (asked := at_once * spec.world_size) > most:
            options = "--nodes, --gpus-per-node, --tasks-per-node" + (", --array" if at_once > 1 else "")
            raise SpecError(
                f"{asked} ranks are asked for ({options}), but on this machine with {os.cpu_count()} CPUs "
                f"the local backend starts {most} at the most. Ask for fewer, or submit to a cluster."
            )
        notes = []
        if spec.array:
            how = f"{at_once} at once" if at_once > 1 else f"one after another ({spec.array}%2: two at once)"
            notes.append(f"There is no queue on this machine: the tasks of the array run {how}.")
        if spec.directives:
            options = ", ".join(f"--{key}" for key in spec.directives)
            changes = "changes" if len(spec.directives) == 1 else "change"
            notes.append(f"There is no queue on this machine: {options} {changes} nothing here.")
        if spec.gpus_per_node:
            notes += self._check_gpus(spec, at_once)
        return Outlook(tuple(notes))

    def _check_gpus(self, spec: JobSpec, at_once: int) -> list[str]:
        from hpctrain.telemetry.gpus import count_gpus

        here = count_gpus(self._environ)
        if here == 0:
            return [f"No GPU here: the {spec.world_size} ranks run on this machine's CPU, with gloo."]
        factors = [spec.nodes, spec.gpus_per_node, *([at_once] if at_once > 1 else [])]
        if (asked := math.prod(factors)) > here:
            options = "--nodes, --gpus-per-node" + (", --array" if at_once > 1 else "")
            raise SpecError(
                f"{' × '.join(map(str, factors))} = {asked} GPUs are asked for ({options}), but this machine "
                f"has {here}, which its pretend nodes share. Ask for fewer, or "
                f"for ranks on CPUs with --tasks-per-node {spec.gpus_per_node} instead of --gpus-per-node."
            )
        if spec.gpu_type is not None:
            return [f"Any GPU of this machine is taken: the type {spec.gpu_type} changes nothing here."]
        return []

    def submit(self, spec: JobSpec, run: RunDir, lock: int) -> str:  # noqa: ARG002
        try:
            with open(run.slurm_log, "ab") as log:
                process = subprocess.Popen(
                    ["/bin/bash", str(run.job_script)],
                    cwd=run.path,
                    env=outer_environment(self._environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=[lock],
                )
        except OSError as error:
            raise SchedulerError(f"The run's supervisor could not be started: {error}.") from error
        # The script ends in an exec, so this is the supervisor's process id.
        os.pwrite(lock, f"{process.pid}\n".encode(), 0)
        # A program that goes on after submitting must not keep a zombie when the run has ended.
        threading.Thread(target=process.wait, name=f"reap-{process.pid}", daemon=True).start()
        return str(process.pid)

    def look(self, jobs: Sequence[Job]) -> list[JobView]:
        return [self._look(job.run) for job in jobs]

    def cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            # A task that waits for its turn finds the request in its folder.
            if not _waits_in_array(job.run):
                _signal_supervisor(job.run, signal.SIGTERM)

    def requeue(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            _await_start(job.run)
            _signal_supervisor(job.run, signal.SIGUSR2)

    def lift_hold(self, jobs: Sequence[Job]) -> bool:  # noqa: ARG002
        return False

    def _look(self, run: RunDir) -> JobView:
        if is_locked(run.lock):
            return JobView(RunState.RUNNING)
        if _waits_in_array(run):
            return JobView(RunState.CANCELLED if run.cancel_request.exists() else RunState.PENDING)
        return JobView(
            RunState.FAILED,
            f"its supervisor ended without a word; {shlex.quote(str(run.slurm_log))} may tell why",
        )


def _tasks_at_once(spec: JobSpec) -> int:
    """How many tasks of an array run at the same time: without a limit it is one here."""
    return Array.parse(spec.array).throttle or 1 if spec.array else 1


def _waits_in_array(run: RunDir) -> bool:
    """Whether the run is a task of an array whose supervisor has not come to it yet."""
    return run.array is not None and not is_locked(run.lock) and is_locked(run.array.lock)


def _await_start(run: RunDir) -> None:
    """Wait until the supervisor knows what a signal means: it would end what its script does before.

    Raises:
        SchedulerError: that takes too long.
    """
    deadline = time.monotonic() + _START_LIMIT_S
    while is_locked(run.lock) and read_record(run).started is None:
        if time.monotonic() > deadline:
            raise SchedulerError(
                f"No rank of the run {run.path} is running: they are being started. "
                "Try again in some seconds."
            )
        time.sleep(0.05)


def _signal_supervisor(run: RunDir, number: signal.Signals) -> None:
    pid = _supervisor_of(run)
    try:
        # A program by which the job script readies something would go on without it, and hold the lock.
        is_script = read_record(run).started is None and os.getpgid(pid) == pid
        (os.killpg if is_script else os.kill)(pid, number)
    except ProcessLookupError:
        raise SchedulerError(
            f"The supervisor of the run {run.path}, process {pid}, has just ended."
        ) from None


def _supervisor_of(run: RunDir) -> int:
    """The process that holds the run's lock.

    Raises:
        SchedulerError: nobody does.
    """
    deadline = time.monotonic() + _NUMBER_LIMIT_S
    # Only while the lock is held is the number in it still this run's process.
    while is_locked(run.lock):
        if text := run.lock.read_text(encoding="ascii").strip():
            return int(text)
        # Whoever started it writes the number down in this moment.
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    raise SchedulerError(f"No supervisor of the run {run.path} is running on this machine.")
