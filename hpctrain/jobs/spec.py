"""What a user asks for, as one frozen value that can be written down and read back."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from hpctrain.errors import SpecError
from hpctrain.files import write_atomic
from hpctrain.jobs.array import Array
from hpctrain.jobs.container import Container
from hpctrain.jobs.copied_code import Code
from hpctrain.jobs.launcher import Torchrun
from hpctrain.jobs.notify import Notify
from hpctrain.jobs.plain_yaml import to_yaml
from hpctrain.jobs.restart import Policy
from hpctrain.jobs.shell import Shell
from hpctrain.jobs.spec_checks import check_spec
from hpctrain.rundir import RunDir

BackendName = Literal["slurm", "local"]
GpuDirective = Literal["gres", "gpus-per-node"]
ContinueBy = Literal["auto", "requeue", "successor"]

NodeCheckWhen = Literal["auto", "always", "never"]

DEFAULT_SIGNAL_LEAD_S = 120


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One run as it was asked for, every default filled in.

    Script, arguments and variables travel in this value, never in the text of a shell script.

    Raises:
        SpecError: a value is out of its range, contradicts another, or cannot arrive untouched.
    """

    script: str
    """Absolute path of the user's Python script."""
    args: tuple[str, ...] = ()
    """Command-line arguments of the script."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables that the ranks get on top of the environment of the submission."""
    name: str
    """The scheduler's name of the job."""
    run_id: str
    run_dir: str
    """Absolute path of the run folder."""
    backend: BackendName
    array: str | None = None
    """The tasks of a job array, in sbatch's notation; each is a run of its own in a folder of its own."""
    array_task: int | None = None
    """Which task of a job array this run is."""
    nodes: int = 1
    """The number of nodes, or the most of them."""
    min_nodes: int = 0
    """The least nodes that the run goes on with; 0 takes `nodes`, so that their number is fixed."""
    spares: int = 0
    """Nodes besides, that wait to take the place of one that is lost."""
    node_check: NodeCheckWhen = "auto"
    """When the nodes are tried out before the ranks start."""
    grow_after_s: int = 600
    """Seconds for which an elastic run trains on fewer nodes before it looks for more; 0 for never."""
    gpus_per_node: int = 0
    """0 runs the ranks on CPUs."""
    gpu_type: str | None = None
    """The scheduler's name for the kind of GPU; None takes any."""
    gpu_directive: GpuDirective = "gres"
    """The option of sbatch by which this site is asked for GPUs."""
    tasks_per_node: int = 0
    """Ranks on each node; 0 takes one for each GPU, or a single one on CPUs."""
    cpus_per_task: int | None = None
    python: str
    """The interpreter that runs the supervisor and the ranks."""
    workdir: str
    """Absolute path of the folder in which the script is run: where the user was."""
    time_limit_s: float | None = None
    """None leaves the limit to the partition."""
    signal_lead_s: int = 0
    """Seconds before the time limit at which the ranks are told to save; 0 takes 120, or a third of the
    time limit where that is shorter."""
    max_failures: int = 3
    """Crashes in a row, with no new checkpoint between them, that end the run."""
    restart: dict[str, dict[str, int]] = field(default_factory=dict)
    """What the user changed in the table of what follows on which kind of end: by kind, by field."""
    continue_by: ContinueBy = "auto"
    """How a run that was stopped goes on: as the same job, requeued, or as a successor job; auto takes what
    the site allows."""
    warm_workers_s: int | None = 30
    """Seconds of training after which workers wait ready for the next start; None for none."""
    hang_limit_s: int | None = 300
    """The least seconds without a step after which a run counts as hung; None never looks."""
    directives: dict[str, str] = field(default_factory=dict)
    """All other `#SBATCH` options, by their long names without the dashes; a flag has no value."""
    template: str | None = None
    """Name or path of the template of the batch script; None takes the one that fits."""
    shell: Shell = field(default_factory=Shell)
    """What the batch script readies before the supervisor starts."""
    torchrun: Torchrun | None = None
    """How an agent of torchrun on each node starts the ranks; None starts each by itself."""
    code: Code | None = None
    """The copy of the code that the ranks run; None where they run the script itself."""
    container: Container | None = None
    """What the ranks run in; None for no container."""
    notify: Notify = field(default_factory=Notify)
    """Whom the run tells when it ends, fails or stalls."""

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes. Of an elastic run, fewer may have been granted."""
        return self.nodes * self.tasks_per_node

    @property
    def most_granted(self) -> int:
        """The most nodes that the scheduler is asked for, spare ones included."""
        return self.nodes + self.spares

    @property
    def least_granted(self) -> int:
        """The nodes without which the job does not start: an elastic run waits for no spare ones."""
        return self.min_nodes if self.is_elastic else self.most_granted

    @property
    def policy(self) -> Policy:
        """What follows on which kind of end."""
        return Policy.of(self.restart, self.max_failures)

    @property
    def is_elastic(self) -> bool:
        """Whether the run takes fewer nodes where it does not get all."""
        return self.min_nodes < self.nodes

    @property
    def entry(self) -> str:
        """Path of the script that the ranks run."""
        return (self.code and self.code.script) or self.script

    @property
    def folders(self) -> dict[str, str]:
        """Folders that the ranks need, by what they are."""
        run = RunDir(Path(self.run_dir))
        code = os.path.dirname(self.script) if self.code is None else self.code.source
        return {
            "run folder": str((run.array or run).path),
            "working folder": self.workdir,
            "folder of the code": code,
        }

    @property
    def processes_per_node(self) -> int:
        """How many processes the supervisor starts on a node: its ranks, or an agent that starts them."""
        return self.tasks_per_node if self.torchrun is None else 1

    def __post_init__(self) -> None:
        if self.min_nodes == 0:
            object.__setattr__(self, "min_nodes", self.nodes)
        if self.tasks_per_node == 0:
            object.__setattr__(self, "tasks_per_node", self.gpus_per_node or 1)
        if self.signal_lead_s == 0:
            longest = DEFAULT_SIGNAL_LEAD_S
            if self.time_limit_s is not None:
                longest = min(longest, max(1, int(self.time_limit_s / 3)))
            object.__setattr__(self, "signal_lead_s", longest)
        _check_choice("backend", self.backend, BackendName)
        _check_choice("gpu-directive", self.gpu_directive, GpuDirective)
        _check_choice("node-check", self.node_check, NodeCheckWhen)
        _check_choice("continue-by", self.continue_by, ContinueBy)
        check_spec(self)

    def task(self, index: int) -> JobSpec:
        """The specification of one task of the array that this one describes."""
        run = RunDir(Path(self.run_dir)).task(index)
        return replace(self, array=None, array_task=index, run_dir=str(run.path), run_id=run.run_id)

    def tasks(self) -> list[JobSpec]:
        """The specifications of all tasks; none where this is a single run."""
        return [self.task(index) for index in Array.parse(self.array).indices] if self.array else []

    def save(self, path: Path, *, durable: bool = True) -> None:
        """Write the specification to `path` as YAML. See `write_atomic`.

        Raises:
            OSError: the file cannot be written.
        """
        write_atomic(path, self.text(), durable=durable)

    def text(self) -> str:
        """The specification as YAML."""
        return to_yaml(asdict(self))

    @classmethod
    def load(cls, path: Path) -> JobSpec:
        """Read the specification that `save` wrote.

        Raises:
            SpecError: the file is missing, or is no specification.
        """
        import yaml

        try:
            values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(
                f"The specification {path} cannot be read: {error.strerror}. Submit the run again."
            ) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise SpecError(
                f"The specification {path} is not valid YAML: {error}. Submit the run again."
            ) from error
        if not isinstance(values, dict):
            raise SpecError(f"The specification {path} holds no mapping of fields. Submit the run again.")
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise SpecError(
                f"The specification {path} has unknown fields: {', '.join(unknown)}. Submit the run again."
            )
        try:
            parts = {name: kind(**_listed(values[name])) for name, kind in _PARTS.items() if values.get(name)}
            return cls(**{**_listed(values), **parts})
        except TypeError as error:
            raise SpecError(
                f"The specification {path} is incomplete: {error}. Submit the run again."
            ) from error


#: Fields that are mappings in the file.
_PARTS: dict[str, Callable[..., Any]] = {
    "shell": Shell,
    "torchrun": Torchrun,
    "code": Code,
    "container": Container,
    "notify": Notify,
}


def _listed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with tuples for lists, of which YAML knows no other kind."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _check_choice(option: str, value: str, choices: object) -> None:
    known = get_args(choices)
    if value not in known:
        raise SpecError(f"There is no {option} {value!r} (--{option}). Take one of {', '.join(known)}.")
