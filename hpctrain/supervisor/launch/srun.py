"""Start the tasks of a step under srun."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections import deque
from collections.abc import Mapping

from hpctrain import system
from hpctrain.cluster import compress_hostlist, expand_hostlist
from hpctrain.cluster.addresses import address_towards
from hpctrain.cluster.env_defaults import apply_env_defaults
from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobspec.directives import srun_options
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import ATTEMPT_VARIABLE
from hpctrain.slurm.command import COMMAND_LIMIT_S, find_step, job_step_name
from hpctrain.slurm.environment import own_job_id, strip_job_env
from hpctrain.slurm.job_requests import signal_steps
from hpctrain.supervisor.launch.job_step import EmitEvent, StepEnded, TaskExit
from hpctrain.supervisor.launch.task_command import (
    containerize,
    job_variables,
    prefixed,
    restore_names_command,
)

#: Maximum number of nodes to try for a route: with a hanging resolver, each try takes seconds.
_MAX_ROUTE_PROBES = 4
#: Time limit for killed tasks to exit; usually shorter if the nodes are up.
_KILL_TIMEOUT_S = 8.0
#: Variables of the batch script that srun would use as options of the step. srun or `job_variables` sets them
#: for the ranks.
_JOB_SHAPE = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST"),
    *("SLURM_NODELIST", "SLURM_CPUS_PER_TASK", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    *("SLURM_CPU_BIND", "SLURM_DISTRIBUTION"),
    # From hpctrain's own directive. In a rank, it would apply to the user's calls of srun.
    "SLURM_OPEN_MODE",
)

# srun's report of tasks that did not exit with 0, as in:
#     srun: error: n3: task 5: Killed
#     srun: error: n1: tasks 0-1,3: Exited with exit code 75
_TASKS_ENDED = re.compile(r"srun: error: [^:\s]+: tasks? ([\d,-]+): (.+?)(?: \(core dumped\))?$", re.ASCII)
_EXIT_CODE = re.compile(r"Exited with exit code (\d{1,3})\b", re.ASCII)
#: Reported for tasks killed by the kernel at the memory limit of their cgroup, if the site sets limits.
_OUT_OF_MEMORY = "Out Of Memory"
_SIGNALS_BY_NAME = {signal.strsignal(number): number for number in signal.Signals}


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
        self.address = _address_of_this_host(granted)
        self._spec = spec
        self._job_id = own_job_id(environ)
        self._environ = {name: value for name, value in environ.items() if name not in _JOB_SHAPE}

    def start(
        self, command: list[str], variables: Mapping[str, str], emit: EmitEvent, *, beside: bool = False
    ) -> SrunStep:
        spec = self._spec
        name = job_step_name(int(variables[ATTEMPT_VARIABLE]), waits=beside)
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


class SrunStep:
    def __init__(
        self, command: list[str], environ: Mapping[str, str], job_id: str, name: str, emit: EmitEvent
    ) -> None:
        self._emit = emit
        self._job_id, self._name = job_id, name
        self._outer = strip_job_env(environ)
        self._killed = False
        self._stderr_tail: deque[str] = deque(maxlen=5)
        self._srun = system.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # A signal to the supervisor must not reach srun, which would end the step at once.
            start_new_session=True,
        )
        self._reader = system.Thread(target=self._read, daemon=True)
        self._reader.start()

    def signal(self, number: signal.Signals) -> None:
        if (step := find_step(self._job_id, self._name, self._outer)) is not None:
            signal_steps([step], number, self._outer)

    def is_over(self) -> bool:
        return find_step(self._job_id, self._name, self._outer) is None

    def kill(self) -> None:
        """Kill every task immediately through Slurm or, if Slurm is unreachable, through srun.

        For a lost node, srun would wait for tasks until Slurm marks the node down; srun is killed earlier.
        """
        if not self._killed:
            system.Thread(target=self._kill_until_gone, daemon=True).start()
        self._killed = True
        try:
            self.signal(signal.SIGKILL)
        except SchedulerError as error:
            print(f"hpctrain: cannot kill the ranks through Slurm ({error}); killing srun", flush=True)
            self._srun.terminate()

    def _kill_until_gone(self) -> None:
        for end in (self._srun.terminate, self._srun.kill):
            try:
                self._srun.wait(_KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                end()

    def close(self) -> None:
        if self._srun.poll() is None:
            self.kill()
            try:
                self._srun.wait(COMMAND_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._srun.kill()
                self._srun.wait()
        self._reader.join(COMMAND_LIMIT_S)

    def _read(self) -> None:
        """Print the output of srun, and convert its task reports to events."""
        assert self._srun.stderr is not None
        for line in self._srun.stderr:
            print(line, end="", flush=True)
            self._stderr_tail.append(line.strip())
            if not self._killed:
                for task in parse_task_report(line):
                    self._emit(task)
        returncode = self._srun.wait()
        self._emit(StepEnded(returncode, " ".join(self._stderr_tail)))


def parse_task_report(line: str) -> list[TaskExit]:
    """Parse the task exits reported in a line of srun's stderr; empty for other lines."""
    match = _TASKS_ENDED.match(line.strip())
    if match is None:
        return []
    try:
        ranks = [int(name) for name in expand_hostlist(f"[{match[1]}]")]
    except ValueError:  # A program printed a similar line.
        return []
    if code := _EXIT_CODE.match(match[2]):
        return [TaskExit(rank, int(code[1])) for rank in ranks]
    if match[2] == _OUT_OF_MEMORY:
        return [TaskExit(rank, None, signal.SIGKILL, out_of_memory=True) for rank in ranks]
    number = _SIGNALS_BY_NAME.get(match[2])
    return [TaskExit(rank, None, number) if number else TaskExit(rank, 1) for rank in ranks]


def _address_of_this_host(hosts: list[str]) -> str:
    """Return the address on the route to another node; this host's name may resolve to a loopback address."""
    for host in hosts[1:_MAX_ROUTE_PROBES]:
        with contextlib.suppress(OSError):
            return address_towards(host)
    return hosts[0] if len(hosts) > 1 else "127.0.0.1"
