"""The user's request for a run, as a frozen, serializable object."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpctrain.jobspec.container import Container
from hpctrain.jobspec.launcher import ProgramKind, TorchrunConfig
from hpctrain.jobspec.notify import NotifyConfig
from hpctrain.jobspec.restart_policy import RestartPolicy
from hpctrain.jobspec.shell_setup import ShellSetup
from hpctrain.rundir import RunDir
from hpctrain.slurm.job_array import JobArray

BackendName = Literal["slurm", "local"]
GpuRequestStyle = Literal["gres", "gpus-per-node"]
ResumeMode = Literal["auto", "requeue", "successor"]

NodeCheckMode = Literal["auto", "always", "never"]
CpuBindingMode = Literal["auto", "none"]
MpiPlugin = Literal["none", "pmi2", "pmix"]

DEFAULT_STOP_BEFORE_LIMIT_S = 120
DEFAULT_SNAPSHOT_LIMIT_MB = 200


def default_stop_before_limit_s(time_limit_s: float | None) -> int:
    """Return the seconds between the stop signal and a time limit, unless the user sets them."""
    if time_limit_s is None:
        return DEFAULT_STOP_BEFORE_LIMIT_S
    return min(DEFAULT_STOP_BEFORE_LIMIT_S, max(1, int(time_limit_s / 3)))


@dataclass(frozen=True, kw_only=True)
class CodeRef:
    """A copy of the code that a run executes."""

    source: str
    """Root of the working tree that was copied."""
    copy: str
    """Root of the copy, in the run folder."""
    script: str | None
    """Path of the copied script; None if the script is outside the working tree."""
    limit_mb: int = DEFAULT_SNAPSHOT_LIMIT_MB
    """Maximum size of the copy."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The request for a run, with all defaults filled in.

    Script, arguments and variables are passed in this object, never in a shell script.
    `check_spec` checks the values. `hpctrain submit --help` describes the options of the same names.
    """

    script: str
    """Absolute path of the user's Python script; or a module or command, depending on `program`."""
    program: ProgramKind = "script"
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    name: str
    run_id: str
    run_dir: str
    backend: BackendName
    array: str | None = None
    """Tasks of a job array, in sbatch's notation. Each task is a separate run with its own folder."""
    array_task: int | None = None
    """Index of the array task of this run; None for any other run."""
    nodes: int = 1
    """Number of nodes; the maximum if `min_nodes` is smaller."""
    min_nodes: int = 0
    """Minimum number of nodes; 0 means `nodes`, a fixed number."""
    spare_nodes: int = 0
    node_check: NodeCheckMode = "auto"
    scale_up_after_s: int = 600
    """Seconds after which an elastic run on fewer nodes searches for more nodes; 0 means never."""
    gpus_per_node: int = 0
    gpu_type: str | None = None
    """Name of the GPU type in the scheduler; None accepts any type."""
    gpu_request_style: GpuRequestStyle = "gres"
    ntasks_per_node: int = 0
    """Ranks per node; 0 means one per GPU, or one for CPU runs. With fewer ranks, each has several GPUs."""
    cpus_per_task: int | None = None
    python: str
    """Python interpreter of the supervisor and the ranks."""
    workdir: str
    """Absolute path of the script's working directory: the folder of the submission."""
    time_limit_s: float | None = None
    """Time limit of the job in seconds; None uses the partition's limit."""
    stop_before_limit_s: int = 0
    """Seconds between the stop signal and the time limit, for saving.

    0 means 120, or a third of the time limit if that is shorter.
    """
    max_failures: int = 3
    restart_policy: dict[str, dict[str, int]] = field(default_factory=dict)
    resume_mode: ResumeMode = "auto"
    expedite_requeue: bool = False
    """True if Slurm starts the requeued job without a delay."""
    standby_workers_s: int | None = 30
    """Seconds of training after which standby workers are started; None disables them."""
    hang_timeout_s: int | None = 300
    """Minimum seconds without a step after which a run counts as hung; None disables the check."""
    mpi: MpiPlugin = "none"
    srun_args: tuple[str, ...] = ()
    checkpoints: str | None = None
    """Pattern of the checkpoints of a script without the `Trainer`, besides those in the run folder."""
    cpu_binding: CpuBindingMode = "auto"
    independent_ranks: bool = False
    directives: dict[str, str] = field(default_factory=dict)
    """All other `#SBATCH` options, by long name without the leading dashes. A flag has an empty value."""
    template: str | None = None
    """Name or path of the batch script template; None selects a built-in template."""
    supervised: bool = True
    """False if the batch script starts the ranks without hpctrain, as the template `plain` does."""
    shell: ShellSetup = field(default_factory=ShellSetup)
    torchrun: TorchrunConfig | None = None
    """Configuration of the torchrun agents that start the ranks; None lets the supervisor start each rank."""
    code: CodeRef | None = None
    """The copy of the code that the ranks execute; None if they execute the script itself."""
    container: Container | None = None
    stage: dict[str, str] = field(default_factory=dict)
    """Files, folders and archives to copy to the local disk of each node, by name of the copy."""
    stage_environment: bool = False
    notify: NotifyConfig = field(default_factory=NotifyConfig)

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes. An elastic run may have fewer."""
        return self.nodes * self.ntasks_per_node

    @property
    def gpus_per_task(self) -> int:
        """GPUs of each rank; 0 for runs on CPUs."""
        return self.gpus_per_node // self.ntasks_per_node

    @property
    def most_granted(self) -> int:
        """Maximum number of nodes to request, including spare nodes."""
        return self.nodes + self.spare_nodes

    @property
    def least_granted(self) -> int:
        """Nodes that the job needs to start. An elastic run does not wait for spare nodes."""
        return self.min_nodes if self.is_elastic else self.most_granted

    @property
    def policy(self) -> RestartPolicy:
        return RestartPolicy.with_changes(self.restart_policy, self.max_failures)

    @property
    def is_elastic(self) -> bool:
        """True if the run can use fewer nodes than `nodes`."""
        return self.min_nodes < self.nodes

    @property
    def entry(self) -> str:
        """Path of the script that the ranks execute; a module or command by its name."""
        return (self.code and self.code.script) or self.script

    @property
    def folders(self) -> dict[str, str]:
        """Folders that the ranks need, by description."""
        run = RunDir(Path(self.run_dir))
        script_folder = os.path.dirname(self.script) if self.program == "script" else self.workdir
        code = script_folder if self.code is None else self.code.source
        return {
            "run folder": str((run.array or run).path),
            "working directory": self.workdir,
            "code folder": code,
        }

    @property
    def processes_per_node(self) -> int:
        """Processes that the supervisor starts per node: the ranks, or one torchrun agent."""
        return self.ntasks_per_node if self.torchrun is None else 1

    def __post_init__(self) -> None:
        if self.min_nodes == 0:
            object.__setattr__(self, "min_nodes", self.nodes)
        if self.ntasks_per_node == 0:
            object.__setattr__(self, "ntasks_per_node", self.gpus_per_node or 1)
        if self.stop_before_limit_s == 0:
            object.__setattr__(self, "stop_before_limit_s", default_stop_before_limit_s(self.time_limit_s))

    def task(self, index: int) -> JobSpec:
        run = RunDir(Path(self.run_dir)).task(index)
        return replace(self, array=None, array_task=index, run_dir=str(run.path), run_id=run.run_id)

    def tasks(self) -> list[JobSpec]:
        return [self.task(index) for index in JobArray.parse(self.array).indices] if self.array else []

    def text(self) -> str:
        import yaml

        # libyaml, if PyYAML was built with it: an array may have thousands of tasks.
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        return str(yaml.dump(asdict(self), Dumper=dumper, sort_keys=False))
