"""Run a job step with srun, and convert its reports to events."""

from __future__ import annotations

import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from hpctrain import system
from hpctrain.cluster import expand_hostlist
from hpctrain.errors import EXIT_CONTINUE, SchedulerError
from hpctrain.slurm.command import COMMAND_LIMIT_S, find_step
from hpctrain.slurm.environment import strip_job_env
from hpctrain.slurm.job_requests import signal_steps
from hpctrain.text import signal_name

#: Time limit for killed tasks to exit; usually shorter if the nodes are up.
_KILL_TIMEOUT_S = 8.0
#: Variables of the batch script that srun would use as options of the step. srun or the launcher sets them
#: for the ranks.
JOB_SHAPE_VARIABLES = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST"),
    *("SLURM_NODELIST", "SLURM_CPUS_PER_TASK", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    *("SLURM_CPU_BIND", "SLURM_DISTRIBUTION"),
    # From hpctrain's own directive. In a rank, it would apply to the user's calls of srun.
    "SLURM_OPEN_MODE",
)
#: Stop signals. A task killed by a stop signal counts as stopped.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

# srun's report of tasks that did not exit with 0, as in:
#     srun: error: n3: task 5: Killed
#     srun: error: n1: tasks 0-1,3: Exited with exit code 75
_TASKS_ENDED = re.compile(r"srun: error: [^:\s]+: tasks? ([\d,-]+): (.+?)(?: \(core dumped\))?$", re.ASCII)
_EXIT_CODE = re.compile(r"Exited with exit code (\d{1,3})\b", re.ASCII)
#: Reported for tasks killed by the kernel at the memory limit of their cgroup, if the site sets limits.
_OUT_OF_MEMORY = "Out Of Memory"
_SIGNALS_BY_NAME = {signal.strsignal(number): number for number in signal.Signals}


class TaskResult(Enum):
    DONE = "done"
    CONTINUE = "continue"
    """The state is saved, or there was no state yet: continue later."""
    FAILED = "failed"


@dataclass(frozen=True)
class TaskExit:
    """Exit of a task that was not caused by the supervisor."""

    rank: int
    code: int | None
    signal: int | None = None
    out_of_memory: bool = False
    """True if the kernel killed the task because the job exceeded its memory."""

    @property
    def result(self) -> TaskResult:
        if self.code == 0:
            return TaskResult.DONE
        is_stopped = self.code == EXIT_CONTINUE or self.signal in _STOP_SIGNALS
        return TaskResult.CONTINUE if is_stopped else TaskResult.FAILED

    @classmethod
    def from_returncode(cls, rank: int, returncode: int) -> TaskExit:
        """Convert a return code of `subprocess`: a negative code is a signal."""
        return cls(rank, None, -returncode) if returncode < 0 else cls(rank, returncode)

    def __str__(self) -> str:
        return f"was killed by {signal_name(self.signal)}" if self.signal else f"exited with code {self.code}"


@dataclass(frozen=True)
class StepEnded:
    """End of the step: no task is left."""

    returncode: int
    stderr_tail: str = ""
    """End of the launcher's output, if the launcher itself failed."""


class SrunStep:
    def __init__(
        self,
        command: list[str],
        environ: Mapping[str, str],
        job_id: str,
        name: str,
        emit: Callable[[TaskExit | StepEnded], None],
    ) -> None:
        self._emit, self._job_id, self._name = emit, job_id, name
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
        """Kill every task immediately, through srun if Slurm is unreachable or has not marked a node down."""
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
