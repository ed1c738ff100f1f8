"""Pretend nodes: the tasks of a step as processes of this machine, with the variables that srun would set."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

from hpctrain.cluster import compress_hostlist
from hpctrain.cluster.defaults import with_defaults
from hpctrain.cluster.devices import visible_devices
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import LIFELINE_VARIABLE
from hpctrain.supervisor.container import enclose
from hpctrain.supervisor.step import Emit, StepEnded, TaskExit
from hpctrain.telemetry.gpus import count_gpus

#: Seconds that killed processes have to disappear: they are gone at once unless the kernel holds them.
_REAP_LIMIT_S = 30.0


class LocalLauncher:
    """Starts the ranks of pretend nodes on this machine."""

    address = "127.0.0.1"

    def __init__(self, spec: JobSpec, environ: Mapping[str, str]) -> None:
        self.hosts = [f"local-{i}" for i in range(spec.nodes)]
        self.spares: list[str] = []  # Pretend nodes are not lost.
        self._spec = spec
        self._environ = environ
        self._gpus = visible_gpus(environ)
        self._num_steps = 0

    def start(
        self,
        command: list[str],
        variables: Mapping[str, str],
        emit: Emit,
        *,
        beside: bool = False,  # noqa: ARG002 (processes share a machine anyway)
    ) -> LocalStep:
        """Start one process a rank. See `Launcher.start`."""
        spec = self._spec
        num_nodes = len(self.hosts)
        count, num_ranks = num_nodes * spec.processes_per_node, num_nodes * spec.tasks_per_node
        defaults = {
            "OMP_NUM_THREADS": str(spec.cpus_per_task or max(1, (os.cpu_count() or 1) // num_ranks)),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
        job = {
            **with_defaults({**self._environ, **spec.env}, defaults),
            **variables,
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": str(self._num_steps),
            "SLURM_STEP_NODELIST": compress_hostlist(self.hosts),
            "SLURM_STEP_NUM_NODES": str(num_nodes),
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_TASKS_PER_NODE": f"{spec.processes_per_node}(x{num_nodes})",
        }
        if spec.array_task is not None:
            job |= {"SLURM_ARRAY_JOB_ID": str(os.getppid()), "SLURM_ARRAY_TASK_ID": str(spec.array_task)}
        self._num_steps += 1
        if spec.container is not None:
            # The image may have variables of the same names.
            command = ["/usr/bin/env", *(f"{name}={value}" for name, value in spec.env.items()), *command]
            command = enclose(spec, command, [*variables, *defaults], job.get("PATH")).command
        return LocalStep(command, spec.workdir, [self._task(job, index) for index in range(count)], emit)

    def _task(self, job: Mapping[str, str], index: int) -> dict[str, str]:
        node, local_index = divmod(index, self._spec.processes_per_node)
        task = {
            **job,
            "SLURM_PROCID": str(index),
            "SLURM_LOCALID": str(local_index),
            "SLURM_NODEID": str(node),
            "SLURMD_NODENAME": self.hosts[node],
        }
        first = node * self._spec.gpus_per_node
        if gpus := self._gpus[first : first + self._spec.gpus_per_node]:
            task["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return task


def end_session(environ: Mapping[str, str]) -> None:
    """End what the job script has left in the background, as Slurm does when a job is over.

    It would hold the run's lock. Nothing is done in a session that is another's, such as a shell's.
    """
    if "SLURM_JOB_ID" not in environ and os.getsid(0) == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    count = count_gpus(environ)
    listed = visible_devices(environ)
    return [str(i) for i in range(count)] if listed is None else listed[:count]


class LocalStep:
    """Processes of one step, each the leader of a session of its own."""

    def __init__(self, command: list[str], workdir: str, tasks: list[dict[str, str]], emit: Emit) -> None:
        self._emit = emit
        self._lock = threading.Lock()
        self._killed = False
        # Tasks watch the reading end: it closes when this process dies, however it dies.
        reading, self._lifeline = os.pipe()
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for task in tasks:
                environ = {**task, LIFELINE_VARIABLE: str(reading)}
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=environ,
                        cwd=workdir,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                        pass_fds=(reading,),
                    )
                )
        except BaseException:
            self.kill()
            for process in self._processes:
                process.wait()
            os.close(self._lifeline)
            raise
        finally:
            os.close(reading)
        self._waiters = [
            threading.Thread(target=self._wait_for, args=(rank,), daemon=True)
            for rank in range(len(self._processes))
        ]
        self._ender = threading.Thread(target=self._end, daemon=True)
        for thread in (*self._waiters, self._ender):
            thread.start()

    def signal(self, number: signal.Signals) -> None:
        """Send `number` to every process of every task, as Slurm does."""
        with self._lock:
            for process in self._processes:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)

    def is_over(self) -> bool:
        """The end of each process is noticed at once. See `Step.is_over`."""
        return False

    def kill(self) -> None:
        """End every task at once."""
        self._killed = True
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill what is left, and wait until it is gone."""
        self.kill()
        self._ender.join(_REAP_LIMIT_S)
        os.close(self._lifeline)

    def _wait_for(self, rank: int) -> None:
        process = self._processes[rank]
        if hasattr(os, "waitid"):
            # The leader stays unreaped here, so its number cannot belong to another group yet.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            if hasattr(os, "waitid"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            killed = self._killed
            returncode = process.wait()
        if not killed:
            self._emit(TaskExit.from_returncode(rank, returncode))

    def _end(self) -> None:
        for waiter in self._waiters:
            waiter.join()
        worst = max((abs(process.returncode) for process in self._processes), default=0)
        self._emit(StepEnded(worst))
