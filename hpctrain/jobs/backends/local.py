"""Jobs on this machine: the same job script and supervisor, as a detached process."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import ClassVar

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.files import is_locked
from hpctrain.jobs.environment import outer_environment
from hpctrain.jobs.spec import BackendName, JobSpec
from hpctrain.jobs.states import JobView, RunState
from hpctrain.rundir import RunDir

#: Each rank is a process with PyTorch in it: beyond this a laptop is only kept busy.
_RANKS_PER_CPU, _LEAST_RANKS = 4, 32


class LocalBackend:
    """Jobs on this machine. A run is alive as long as its supervisor holds the run's lock."""

    name: ClassVar[BackendName] = "local"

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def check(self, spec: JobSpec) -> list[str]:
        most = max(_LEAST_RANKS, _RANKS_PER_CPU * (os.cpu_count() or 1))
        if spec.world_size > most:
            raise SpecError(
                f"{spec.world_size} ranks are asked for (--nodes, --gpus-per-node, --tasks-per-node), but "
                f"on this machine with {os.cpu_count()} CPUs the local backend starts {most} at the most. "
                "Ask for fewer, or submit to a cluster."
            )
        notes = []
        if spec.directives:
            options = ", ".join(f"--{key}" for key in spec.directives)
            notes.append(f"There is no queue on this machine: {options} changes nothing here.")
        if spec.gpus_per_node:
            notes += self._check_gpus(spec)
        return notes

    def _check_gpus(self, spec: JobSpec) -> list[str]:
        from hpctrain.telemetry.gpus import count_gpus

        asked = spec.nodes * spec.gpus_per_node
        here = count_gpus(self._environ)
        if here == 0:
            return [f"No GPU here: the {spec.world_size} ranks run on this machine's CPU, with gloo."]
        if asked > here:
            raise SpecError(
                f"{spec.nodes} × {spec.gpus_per_node} = {asked} GPUs are asked for "
                f"(--nodes, --gpus-per-node), but this machine has {here}, which its pretend "
                f"nodes share. Ask for fewer, or "
                f"for ranks on CPUs with --tasks-per-node {spec.gpus_per_node} instead of --gpus-per-node."
            )
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

    def look(self, jobs: Sequence[tuple[str, RunDir]]) -> list[JobView]:
        return [self._look(run) for _, run in jobs]

    def cancel(self, job_id: str, run: RunDir) -> None:  # noqa: ARG002 (the lock names the process)
        _signal_supervisor(run, signal.SIGTERM)

    def requeue(self, job_id: str, run: RunDir) -> None:  # noqa: ARG002
        _signal_supervisor(run, signal.SIGUSR2)

    def lift_hold(self, job_id: str) -> bool:  # noqa: ARG002
        return False

    def _look(self, run: RunDir) -> JobView:
        if is_locked(run.lock):
            return JobView(RunState.RUNNING)
        return JobView(
            RunState.FAILED,
            f"its supervisor ended without a word; {shlex.quote(str(run.slurm_log))} may tell why",
        )


def _signal_supervisor(run: RunDir, number: signal.Signals) -> None:
    # Only while the lock is held is the number in it still this run's process.
    try:
        text = run.lock.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        text = ""
    if not text or not is_locked(run.lock):
        raise SchedulerError(f"No supervisor of the run {run.path} is running on this machine.")
    try:
        os.kill(int(text), number)
    except ProcessLookupError:
        raise SchedulerError(
            f"The supervisor of the run {run.path}, process {text}, has just ended."
        ) from None
