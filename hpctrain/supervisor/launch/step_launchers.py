"""Start the tasks of a step with srun, or as local processes on simulated nodes, with srun's variables."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from hpctrain import system
from hpctrain.cluster import compress_hostlist, expand_hostlist
from hpctrain.cluster.addresses import address_towards
from hpctrain.cluster.amd_gpus import HIP_VARIABLES, list_amd_gpus
from hpctrain.cluster.visible_gpus import VISIBLE_VARIABLE, gpu_variables, visible_devices
from hpctrain.errors import SpecError
from hpctrain.jobspec.job_directives import srun_options
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import ATTEMPT_VARIABLE, CPU_BINDING_VARIABLE, LIFELINE_VARIABLE, STANDBY_VARIABLE
from hpctrain.slurm.command import job_step_name
from hpctrain.slurm.environment import apply_env_defaults, own_job_id
from hpctrain.slurm.srun_step import JOB_SHAPE_VARIABLES, SrunStep, StepEnded, TaskExit
from hpctrain.supervisor.launch.container_command import containerize
from hpctrain.supervisor.launch.job_step import EmitEvent
from hpctrain.supervisor.launch.task_command import job_variables, prefixed, restore_names_command
from hpctrain.telemetry.sampling.nvml import count_gpus

#: Maximum number of nodes to try for a route: with a hanging resolver, each try takes seconds.
_MAX_ROUTE_PROBES = 4
#: Maximum seconds for killed processes to exit; immediate unless the kernel blocks them.
_REAP_LIMIT_S = 30.0


class SrunLauncher:
    def __init__(self, spec: JobSpec, environ: Mapping[str, str]) -> None:
        if "SLURM_JOB_NODELIST" not in environ:
            raise SpecError(
                "SLURM_JOB_NODELIST is not set, so this process is not in a Slurm job. Submit the script: "
                "sbatch job.sbatch"
            )
        granted = expand_hostlist(environ["SLURM_JOB_NODELIST"])
        self.hosts, self.spares = granted[: spec.nodes], granted[spec.nodes :]
        self._num_granted = len(granted)
        self.address = address_of_this_host(granted)
        self._spec = spec
        self._job_id = own_job_id(environ)
        self._environ = {name: value for name, value in environ.items() if name not in JOB_SHAPE_VARIABLES}

    def start(self, command: list[str], variables: Mapping[str, str], emit: EmitEvent) -> SrunStep:
        spec = self._spec
        name = job_step_name(int(variables[ATTEMPT_VARIABLE]), waits=STANDBY_VARIABLE in variables)
        options = [f"--job-name={name}", *srun_options(spec, len(self.hosts))]
        if len(self.hosts) < self._num_granted:
            options.append(f"--nodelist={compress_hostlist(self.hosts)}")
        # The user's variables and those of the job are for the ranks, not for srun, which would replace the
        # job name with the step name.
        named = {name: self._environ[name] for name in ("SLURM_JOB_NAME",) if name in self._environ}
        rank_variables = named | job_variables(spec, self.hosts) | spec.env
        hidden = prefixed(rank_variables)
        threads = str(spec.cpus_per_task or 1)
        defaults = {} if "OMP_NUM_THREADS" in spec.env else {"OMP_NUM_THREADS": threads}
        environ = apply_env_defaults({**self._environ, **variables, **hidden}, defaults)
        command = restore_names_command(command, rank_variables)
        containerized = containerize(spec, command, [*variables, *hidden, *defaults], environ.get("PATH"))
        srun = ["srun", *options, *containerized.srun_options, *containerized.command]
        return SrunStep(srun, environ, self._job_id, name, emit)


def address_of_this_host(hosts: list[str]) -> str:
    """Return the address on the route to another node; this host's name may resolve to a loopback address."""
    for host in hosts[1:_MAX_ROUTE_PROBES]:
        with contextlib.suppress(OSError):
            return address_towards(host)
    return hosts[0] if len(hosts) > 1 else "127.0.0.1"


class LocalLauncher:
    address = "127.0.0.1"

    def __init__(self, spec: JobSpec, environ: Mapping[str, str]) -> None:
        self.hosts = [f"local-{i}" for i in range(spec.nodes)]
        self.spares: list[str] = []  # Simulated nodes cannot be lost.
        self._spec = spec
        self._environ = environ
        self._gpus = visible_gpus(environ)
        self._num_steps = 0

    def start(self, command: list[str], variables: Mapping[str, str], emit: EmitEvent) -> LocalStep:
        spec = self._spec
        num_nodes = len(self.hosts)
        count, num_ranks = num_nodes * spec.processes_per_node, num_nodes * spec.ntasks_per_node
        defaults = {
            "OMP_NUM_THREADS": str(spec.cpus_per_task or max(1, (os.cpu_count() or 1) // num_ranks)),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
        job = {
            **apply_env_defaults({**self._environ, **job_variables(spec, self.hosts), **spec.env}, defaults),
            **variables,
            # Simulated nodes share the CPUs of the machine.
            **({CPU_BINDING_VARIABLE: "none"} if num_nodes > 1 else {}),
            "SLURM_JOB_ID": str(system.getpid()),
            "SLURM_STEP_ID": str(self._num_steps),
            "SLURM_STEP_NODELIST": compress_hostlist(self.hosts),
            "SLURM_STEP_NUM_NODES": str(num_nodes),
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_TASKS_PER_NODE": f"{spec.processes_per_node}(x{num_nodes})",
        }
        if spec.array_task is not None:
            job |= local_array_variables(spec.array_task)
        self._num_steps += 1
        if spec.container is not None:
            # The image may have variables of the same names.
            hidden = prefixed(spec.env)
            job |= hidden
            command = restore_names_command(command, spec.env)
            command = containerize(spec, command, [*variables, *hidden, *defaults], job.get("PATH")).command
        return LocalStep(
            command, spec.workdir, [self._spawn_task(job, index) for index in range(count)], emit
        )

    def _spawn_task(self, job: Mapping[str, str], index: int) -> dict[str, str]:
        node, local_index = divmod(index, self._spec.processes_per_node)
        task = {
            **job,
            "SLURM_PROCID": str(index),
            "SLURM_LOCALID": str(local_index),
            "SLURM_NODEID": str(node),
            "SLURMD_NODENAME": self.hosts[node],
        }
        count = self._spec.gpus_per_node
        return task | gpu_variables(self._gpus[node * count : (node + 1) * count])


def local_array_variables(task: int) -> dict[str, str]:
    return {"SLURM_ARRAY_JOB_ID": str(os.getppid()), "SLURM_ARRAY_TASK_ID": str(task)}


def kill_session(environ: Mapping[str, str]) -> None:
    """End the background processes of the job script, which would hold the run's lock, as Slurm does."""
    if "SLURM_JOB_ID" not in environ and os.getsid(0) == system.getpid():
        system.handle_signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs available to this process, in the notation of CUDA_VISIBLE_DEVICES."""
    count = count_gpus(environ)
    hip = next((environ[name] for name in HIP_VARIABLES if name in environ), None)
    listed = visible_devices({VISIBLE_VARIABLE: hip} if hip is not None and list_amd_gpus() else environ)
    return [str(i) for i in range(count)] if listed is None else listed[:count]


class LocalStep:
    """Processes of a step, each the leader of a separate session."""

    def __init__(
        self, command: list[str], workdir: str, tasks: list[dict[str, str]], emit: EmitEvent
    ) -> None:
        self._emit = emit
        self._lock = system.Lock()
        self._killed = False
        # Tasks watch the read end, which closes when this process exits for any reason.
        read_end, self._lifeline = os.pipe()
        self._processes: list[system.Popen[bytes]] = []
        try:
            for task in tasks:
                process = system.Popen(
                    command,
                    env={**task, LIFELINE_VARIABLE: str(read_end)},
                    cwd=workdir,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=(read_end,),
                )
                self._processes.append(process)
        except BaseException:
            self.kill()
            for process in self._processes:
                process.wait()
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
        ranks = range(len(self._processes))
        self._waiters = [system.Thread(target=self._wait_for, args=(rank,), daemon=True) for rank in ranks]
        self._ender = system.Thread(target=self._end, daemon=True)
        for thread in (*self._waiters, self._ender):
            thread.start()

    def signal(self, number: signal.Signals) -> None:
        with self._lock:
            for process in self._processes:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)

    def is_over(self) -> bool:
        return False  # The exit of each process is detected immediately.

    def kill(self) -> None:
        self._killed = True
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._ender.join(_REAP_LIMIT_S)
        os.close(self._lifeline)

    def _wait_for(self, rank: int) -> None:
        process = self._processes[rank]
        if hasattr(os, "waitid"):
            # The leader is not reaped yet, so no other group can have the same number.
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
