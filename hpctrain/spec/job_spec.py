"""The user's request for a run, as one frozen, serializable value."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from hpctrain.errors import SpecError
from hpctrain.files import read_regular, write_atomic
from hpctrain.rundir import RunDir
from hpctrain.slurm.job_array import JobArray
from hpctrain.spec.code_ref import CodeRef
from hpctrain.spec.container import Container
from hpctrain.spec.launcher import TorchrunConfig
from hpctrain.spec.notify import NotifyConfig
from hpctrain.spec.plain_yaml import to_yaml
from hpctrain.spec.restart_policy import RestartPolicy
from hpctrain.spec.shell_setup import ShellSetup
from hpctrain.spec.validation import check_spec

BackendName = Literal["slurm", "local"]
GpuRequestStyle = Literal["gres", "gpus-per-node"]
ResumeMode = Literal["auto", "requeue", "successor"]

NodeCheckMode = Literal["auto", "always", "never"]

DEFAULT_STOP_BEFORE_LIMIT_S = 120


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The request for a run, with all defaults filled in.

    Script, arguments and variables are passed in this value, never in the text of a shell script.

    Raises:
        SpecError: a value is out of range, contradicts another, or cannot be passed on unchanged.
    """

    script: str
    """Absolute path of the user's Python script."""
    args: tuple[str, ...] = ()
    """Command-line arguments of the script."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables that the ranks get in addition to the submission's environment."""
    name: str
    """Job name in the scheduler."""
    run_id: str
    run_dir: str
    """Absolute path of the run folder."""
    backend: BackendName
    array: str | None = None
    """Tasks of a job array, in sbatch's notation. Each task is a separate run with its own folder."""
    array_task: int | None = None
    """Index of the array task that this run is."""
    nodes: int = 1
    """Number of nodes; the maximum if `min_nodes` is smaller."""
    min_nodes: int = 0
    """Minimum number of nodes to continue with; 0 means `nodes`, a fixed number."""
    spare_nodes: int = 0
    """Additional nodes that wait to replace a lost one."""
    node_check: NodeCheckMode = "auto"
    """When to check the nodes before the ranks start."""
    scale_up_after_s: int = 600
    """Seconds after which an elastic run on fewer nodes looks for more; 0 means never."""
    gpus_per_node: int = 0
    """0 runs the ranks on CPUs."""
    gpu_type: str | None = None
    """The scheduler's name for the GPU type; None accepts any."""
    gpu_request_style: GpuRequestStyle = "gres"
    """The sbatch option that requests GPUs at this site."""
    ntasks_per_node: int = 0
    """Ranks per node; 0 means one per GPU, or one on CPUs."""
    cpus_per_task: int | None = None
    python: str
    """Python interpreter of the supervisor and the ranks."""
    workdir: str
    """Absolute path of the script's working folder: the folder of the submission."""
    time_limit_s: float | None = None
    """None uses the partition's limit."""
    stop_before_limit_s: int = 0
    """Seconds between the stop signal and the time limit, for saving.

    0 means 120, or a third of the time limit if that is shorter.
    """
    max_failures: int = 3
    """Consecutive crashes without a new checkpoint that end the run."""
    restart_policy: dict[str, dict[str, int]] = field(default_factory=dict)
    """The user's changes to the restart policy, by kind of end and field."""
    resume_mode: ResumeMode = "auto"
    """Continuation of a stopped run: requeue of the same job, or a successor job.

    auto takes what the site allows.
    """
    standby_workers_s: int | None = 30
    """Seconds of training after which standby workers are started; None for none."""
    hang_timeout_s: int | None = 300
    """Minimum seconds without a step after which a run counts as hung; None disables the check."""
    directives: dict[str, str] = field(default_factory=dict)
    """All other `#SBATCH` options, by long name without dashes. A flag has an empty value."""
    template: str | None = None
    """Name or path of the batch script template; None selects one."""
    shell: ShellSetup = field(default_factory=ShellSetup)
    """Environment setup in the batch script, before the supervisor starts."""
    torchrun: TorchrunConfig | None = None
    """Configuration of the torchrun agents that start the ranks; None lets the supervisor start each rank."""
    code: CodeRef | None = None
    """The copy of the code that the ranks execute; None if they execute the script itself."""
    container: Container | None = None
    """Container of the ranks, if any."""
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    """Notifications when the run ends, fails or stalls."""

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes. An elastic run may have been granted fewer."""
        return self.nodes * self.ntasks_per_node

    @property
    def most_granted(self) -> int:
        """Maximum number of nodes to request, including spare ones."""
        return self.nodes + self.spare_nodes

    @property
    def least_granted(self) -> int:
        """Nodes that the job needs to start. An elastic run does not wait for spare nodes."""
        return self.min_nodes if self.is_elastic else self.most_granted

    @property
    def policy(self) -> RestartPolicy:
        """The restart policy of the run."""
        return RestartPolicy.of(self.restart_policy, self.max_failures)

    @property
    def is_elastic(self) -> bool:
        """True if the run can use fewer nodes than `nodes`."""
        return self.min_nodes < self.nodes

    @property
    def entry(self) -> str:
        """Path of the script that the ranks execute."""
        return (self.code and self.code.script) or self.script

    @property
    def folders(self) -> dict[str, str]:
        """Folders that the ranks need, by description."""
        run = RunDir(Path(self.run_dir))
        code = os.path.dirname(self.script) if self.code is None else self.code.source
        return {
            "run folder": str((run.array or run).path),
            "working folder": self.workdir,
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
            longest = DEFAULT_STOP_BEFORE_LIMIT_S
            if self.time_limit_s is not None:
                longest = min(longest, max(1, int(self.time_limit_s / 3)))
            object.__setattr__(self, "stop_before_limit_s", longest)
        _check_choice("backend", self.backend, BackendName)
        _check_choice("gpu-request-style", self.gpu_request_style, GpuRequestStyle)
        _check_choice("node-check", self.node_check, NodeCheckMode)
        _check_choice("resume-mode", self.resume_mode, ResumeMode)
        check_spec(self)

    def task(self, index: int) -> JobSpec:
        """Return the specification of one task of this array."""
        run = RunDir(Path(self.run_dir)).task(index)
        return replace(self, array=None, array_task=index, run_dir=str(run.path), run_id=run.run_id)

    def tasks(self) -> list[JobSpec]:
        """Return the specifications of all array tasks; none for a single run."""
        return [self.task(index) for index in JobArray.parse(self.array).indices] if self.array else []

    def save(self, path: Path, *, durable: bool = True) -> None:
        """Write the specification to `path` as YAML. See `write_atomic`.

        Raises:
            OSError: the file cannot be written.
        """
        write_atomic(path, self.text(), durable=durable, private=True)

    def text(self) -> str:
        """Return the specification as YAML."""
        return to_yaml(asdict(self))

    @classmethod
    def load(cls, path: Path) -> JobSpec:
        """Read a specification that `save` wrote.

        Raises:
            SpecError: the file is missing or invalid.
        """
        import yaml

        try:
            values: Any = yaml.safe_load(read_regular(path).decode("utf-8"))
        except OSError as error:
            raise SpecError(
                f"Cannot read the specification {path}: {error.strerror}. Submit the run again."
            ) from error
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise SpecError(
                f"The specification {path} is not valid YAML: {error}. Submit the run again."
            ) from error
        if not isinstance(values, dict):
            raise SpecError(f"The specification {path} is not a mapping of fields. Submit the run again.")
        values = {_FORMER_NAMES.get(name, name): value for name, value in values.items()}
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(str(name) for name in values.keys() - known):
            raise SpecError(
                f"The specification {path} has unknown fields: {', '.join(unknown)}. Submit the run again."
            )
        try:
            parts = {name: kind(**_listed(values[name])) for name, kind in _PARTS.items() if values.get(name)}
            return cls(**{**_listed(values), **parts})
        except SpecError:
            raise
        except (TypeError, AttributeError, ValueError, OverflowError) as error:
            raise SpecError(
                f"The specification {path} is incomplete, or a value has the wrong type: {error}. "
                "Submit the run again."
            ) from error


#: Former field names, in specifications of earlier versions.
_FORMER_NAMES = {
    "continue_by": "resume_mode",
    "gpu_directive": "gpu_request_style",
    "grow_after_s": "scale_up_after_s",
    "hang_limit_s": "hang_timeout_s",
    "restart": "restart_policy",
    "signal_lead_s": "stop_before_limit_s",
    "spares": "spare_nodes",
    "tasks_per_node": "ntasks_per_node",
    "warm_workers_s": "standby_workers_s",
}

#: Fields that are mappings in the file.
_PARTS: dict[str, Callable[..., Any]] = {
    "shell": ShellSetup,
    "torchrun": TorchrunConfig,
    "code": CodeRef,
    "container": Container,
    "notify": NotifyConfig,
}


def _listed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with lists replaced by tuples, which YAML lacks."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _check_choice(option: str, value: str, choices: object) -> None:
    known = get_args(choices)
    if value not in known:
        raise SpecError(f"Unknown {option} {value!r} (--{option}). Choose one of {', '.join(known)}.")
