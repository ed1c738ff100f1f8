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
from hpctrain.files import is_locked, own_file, read_regular
from hpctrain.jobs.backends.backend import PreflightResult
from hpctrain.jobspec.job_spec import BackendName, JobSpec
from hpctrain.records.run_record import read_run_record
from hpctrain.rundir import RunDir
from hpctrain.slurm.environment import strip_job_env
from hpctrain.slurm.job_array import JobArray
from hpctrain.slurm.site_facts import SiteConventions
from hpctrain.slurm.states import JobRecord, JobStateView, RunState
from hpctrain.text import pluralize

#: Each rank is a process with PyTorch: more ranks than this would overload a laptop.
_RANKS_PER_CPU, _MIN_RANKS = 4, 32
#: Maximum seconds until the lock contains the supervisor's process id, and until the ranks have started.
_NUMBER_LIMIT_S, _START_LIMIT_S = 2.0, 5.0


class LocalBackend:
    """Jobs on this machine. A run is alive while its supervisor holds the run's lock."""

    name: ClassVar[BackendName] = "local"

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def site(self, habits: SiteConventions) -> None:
        """Return None: there is no site."""

    def check(self, spec: JobSpec, script: str, habits: SiteConventions) -> PreflightResult:  # noqa: ARG002 (there is no site)
        at_once = JobArray.parse(spec.array).throttle or 1 if spec.array else 1
        max_ranks = max(_MIN_RANKS, _RANKS_PER_CPU * (os.cpu_count() or 1))
        if (num_ranks := at_once * spec.world_size) > max_ranks:
            options = "--nodes, --gpus-per-node, --ntasks-per-node" + (", --array" if at_once > 1 else "")
            raise SpecError(
                f"The job requests {num_ranks} ranks ({options}), but the local backend starts at most "
                f"{max_ranks} on this machine with {os.cpu_count()} CPUs. Request fewer ranks, or submit to "
                "a cluster."
            )
        notes = []
        if spec.array:
            advice = (
                f"{at_once} at a time"
                if at_once > 1
                else f"one after another. Use --array {spec.array.partition('%')[0]}%2 to run two at a time"
            )
            notes.append(f"The tasks of the job array run on this machine, {advice}.")
        if spec.directives.keys() - {"time"}:
            options = ", ".join(f"--{key}" for key in spec.directives if key != "time")
            notes.append(f"The local backend ignores these Slurm options: {options}.")
        if spec.gpus_per_node:
            notes += self._check_gpus(spec, at_once)
        return PreflightResult(tuple(notes))

    def _check_gpus(self, spec: JobSpec, at_once: int) -> list[str]:
        from hpctrain.telemetry.sampling.nvml import count_gpus

        num_gpus = count_gpus(self._environ)
        if num_gpus == 0:
            return [f"No GPU found, so {pluralize(spec.world_size, 'rank')} will run on CPUs."]
        factors = [spec.nodes, spec.gpus_per_node, *([at_once] if at_once > 1 else [])]
        if (requested := math.prod(factors)) > num_gpus:
            options = "--nodes, --gpus-per-node" + (", --array" if at_once > 1 else "")
            raise SpecError(
                f"The job requests {' × '.join(map(str, factors))} = {pluralize(requested, 'GPU')} "
                f"({options}), but this machine has {num_gpus}, which all simulated nodes share. Request "
                f"fewer GPUs, or use CPU ranks with --ntasks-per-node {spec.gpus_per_node} instead of "
                "--gpus-per-node."
            )
        if spec.gpu_type is not None:
            return [
                f"The GPU type {spec.gpu_type} has no effect on this machine: all GPUs are treated the same."
            ]
        return []

    def submit(self, spec: JobSpec, run: RunDir, lock: int) -> str:  # noqa: ARG002
        try:
            with open(run.slurm_log, "ab", opener=own_file) as log:
                process = subprocess.Popen(
                    ["/bin/bash", str(run.job_script)],
                    cwd=run.path,
                    env=strip_job_env(self._environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=[lock],
                )
        except OSError as error:
            raise SchedulerError(f"Could not start the supervisor of the run: {error}.") from error
        # The script becomes the supervisor, unless it has a teardown. Then the supervisor replaces this id.
        os.pwrite(lock, f"{process.pid}\n".encode(), 0)
        # A long-running caller must not keep a zombie process after the run has ended.
        threading.Thread(target=process.wait, name=f"reap-{process.pid}", daemon=True).start()
        return str(process.pid)

    def query(self, jobs: Sequence[JobRecord]) -> list[JobStateView]:
        return [self._query(job.run) for job in jobs]

    def cancel(self, jobs: Sequence[JobRecord]) -> None:
        for job in jobs:
            run = job.run
            # A pending task finds the request in its folder.
            is_pending = run.array is not None and not is_locked(run.lock) and is_locked(run.array.lock)
            if not is_pending:
                _signal_supervisor(run, signal.SIGTERM)

    def requeue(self, jobs: Sequence[JobRecord]) -> None:
        for job in jobs:
            _await_start(job.run)
            _signal_supervisor(job.run, signal.SIGUSR2)

    def release_hold(self, jobs: Sequence[JobRecord]) -> None:
        """Do nothing: there is no delay here."""

    def _query(self, run: RunDir) -> JobStateView:
        try:
            is_going = is_locked(run.lock)
        except PermissionError:
            lock = shlex.quote(str(run.lock))
            explanation = f"{lock} belongs to another user, and only that user can read the state"
            return JobStateView(RunState.UNKNOWN, explanation)
        if is_going:
            return JobStateView(RunState.RUNNING)
        if run.cancel_request.exists():
            return JobStateView(RunState.CANCELLED)  # before the supervisor could record the end
        if run.array is not None and is_locked(run.array.lock):
            return JobStateView(RunState.PENDING)  # or just started
        return JobStateView(
            RunState.FAILED,
            f"the supervisor exited without reporting a result (log: {shlex.quote(str(run.slurm_log))})",
        )


def _await_start(run: RunDir) -> None:
    """Wait until the supervisor handles signals: an earlier signal would end the setup of the job script."""
    deadline = time.monotonic() + _START_LIMIT_S
    while is_locked(run.lock) and read_run_record(run).started is None:
        if time.monotonic() > deadline:
            raise SchedulerError(
                f"The ranks of the run {run.path} have not started yet. Try again in a few seconds."
            )
        time.sleep(0.05)


def _signal_supervisor(run: RunDir, number: signal.Signals) -> None:
    pid = _supervisor_of(run)
    try:
        # Signal the whole group: a setup program of the job script would otherwise keep the lock.
        is_script = read_run_record(run).started is None and os.getpgid(pid) == pid
        (os.killpg if is_script else os.kill)(pid, number)
    except ProcessLookupError:
        raise SchedulerError(
            f"The supervisor of the run {run.path} (process {pid}) has just exited. Check the run with "
            "`hpctrain status`."
        ) from None


def _supervisor_of(run: RunDir) -> int:
    deadline = time.monotonic() + _NUMBER_LIMIT_S
    # The process id in the lock file is valid only while the lock is held.
    while is_locked(run.lock):
        if text := read_regular(run.lock).strip():
            return int(text)
        # The parent process is still writing the id.
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    raise SchedulerError(f"No supervisor of the run {run.path} is running on this machine.")
