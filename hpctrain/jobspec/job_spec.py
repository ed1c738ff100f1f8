"""Define the request for a run, as a frozen, serializable object that is checked when it is created."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct, to_builtins
from msgspec.structs import force_setattr, replace

from hpctrain.errors import SpecError
from hpctrain.jobspec.container import VARIABLE_NAME, Container
from hpctrain.jobspec.launcher import ProgramKind, TorchrunConfig
from hpctrain.jobspec.notify import NotifyConfig
from hpctrain.jobspec.restart_policy import RestartPolicy
from hpctrain.jobspec.shell_setup import ShellSetup
from hpctrain.rundir import RunDir
from hpctrain.slurm.job_array import JobArray
from hpctrain.slurm.sbatch_options import check_srun_args

BackendName = Literal["slurm", "local"]
GpuRequestStyle = Literal["gres", "gpus-per-node"]
ResumeMode = Literal["auto", "requeue", "successor"]

NodeCheckMode = Literal["auto", "always", "never"]
CpuBindingMode = Literal["auto", "none"]
MpiPlugin = Literal["none", "pmi2", "pmix"]

DEFAULT_STOP_BEFORE_LIMIT_S = 120
DEFAULT_SNAPSHOT_LIMIT_MB = 200

_LEAST = {
    **dict.fromkeys(("spare_nodes", "scale_up_after_s", "gpus_per_node"), 0),
    **dict.fromkeys(("nodes", "ntasks_per_node", "cpus_per_task", "max_failures"), 1),
}
#: Slurm stores the lead time of `--signal` in 16 bits.
_MAX_SIGNAL_LEAD_S = 65535

#: Variables that identify a rank; they are set when the ranks start.
_RANK_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
#: Names that begin with a dot are used by hpctrain.
_STAGED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_GPU_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)
#: Strings that need no quotes in YAML: all others, such as `on`, could have another type.
_PLAIN_YAML = re.compile(
    r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z_/][\w/.-]*", re.ASCII | re.IGNORECASE
)
#: Characters that YAML allows only as escape sequences, unlike JSON.
_NOT_YAML = re.compile("[\\x7f-\\x9f\\u2028\\u2029\\ufeff\\ufffe\\uffff]")
#: Characters not allowed in a line of a batch script.
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


def default_stop_before_limit_s(time_limit_s: float | None) -> int:
    """Return the seconds between the stop signal and a time limit, unless the user sets them."""
    if time_limit_s is None:
        return DEFAULT_STOP_BEFORE_LIMIT_S
    return min(DEFAULT_STOP_BEFORE_LIMIT_S, max(1, int(time_limit_s / 3)))


class CodeRef(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A copy of the code that a run executes."""

    source: str
    """Root of the working tree that was copied."""
    copy: str
    """Root of the copy, in the run folder."""
    script: str | None
    """Path of the copied script; None if the script is outside the working tree."""
    limit_mb: int = DEFAULT_SNAPSHOT_LIMIT_MB
    """Maximum size of the copy."""


class JobSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request for a run, with all defaults filled in.

    Script, arguments and variables are passed in this object, never in a shell script.
    `hpctrain submit --help` describes the options of the same names.

    Raises:
        SpecError: a value is out of range, contradicts another, or cannot be passed on unchanged.
    """

    script: str
    """Absolute path of the user's Python script; or a module or command, depending on `program`."""
    program: ProgramKind = "script"
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
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
    restart_policy: dict[str, dict[str, int]] = {}
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
    directives: dict[str, str] = {}
    """All other `#SBATCH` options, by long name without the leading dashes. A flag has an empty value."""
    template: str | None = None
    """Name or path of the batch script template; None selects a built-in template."""
    supervised: bool = True
    """False if the batch script starts the ranks without hpctrain, as the template `plain` does."""
    shell: ShellSetup = ShellSetup()
    torchrun: TorchrunConfig | None = None
    """Configuration of the torchrun agents that start the ranks; None lets the supervisor start each rank."""
    code: CodeRef | None = None
    """The copy of the code that the ranks execute; None if they execute the script itself."""
    container: Container | None = None
    stage: dict[str, str] = {}
    """Files, folders and archives to copy to the local disk of each node, by name of the copy."""
    stage_environment: bool = False
    notify: NotifyConfig = NotifyConfig()

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
            force_setattr(self, "min_nodes", self.nodes)
        if self.ntasks_per_node == 0:
            force_setattr(self, "ntasks_per_node", self.gpus_per_node or 1)
        if self.stop_before_limit_s == 0:
            force_setattr(self, "stop_before_limit_s", default_stop_before_limit_s(self.time_limit_s))
        _check(self)

    def task(self, index: int) -> JobSpec:
        run = RunDir(Path(self.run_dir)).task(index)
        return replace(self, array=None, array_task=index, run_dir=str(run.path), run_id=run.run_id)

    def tasks(self) -> list[JobSpec]:
        return [self.task(index) for index in JobArray.parse(self.array).indices] if self.array else []

    def text(self) -> str:
        """Return the content of `spec.yaml`."""
        # Importing PyYAML would take longer than the rest of a submission, and it is slow for large arrays.
        return "\n".join([*_yaml_lines(to_builtins(self)), ""])


#: Default strings and numbers of the fields.
SPEC_DEFAULTS = {
    name: value
    for name, value in zip(JobSpec.__struct_fields__[::-1], JobSpec.__struct_defaults__[::-1], strict=False)
    if isinstance(value, str | int)
}


def _yaml_lines(value: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, entry in value.items():
        # Keys without a question mark are limited to 1024 characters.
        key = _yaml_scalar(name) if len(name) < 200 else f"? {_yaml_scalar(name)}\n{indent}"
        if isinstance(entry, dict) and entry:
            yield f"{indent}{key}:"
            yield from _yaml_lines(entry, f"{indent}  ")
        elif isinstance(entry, tuple) and entry:
            yield f"{indent}{key}:"
            yield from (f"{indent}- {_yaml_scalar(item)}" for item in entry)
        else:
            yield f"{indent}{key}: {_yaml_scalar(entry)}"


def _yaml_scalar(value: object) -> str:
    if isinstance(value, str) and _PLAIN_YAML.fullmatch(value):
        return value
    # YAML contains JSON, except for numbers such as 1e+18, and for characters that are not printable.
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and "." not in text:
        return text.replace("e", ".0e")
    return _NOT_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _check(spec: JobSpec) -> None:
    if spec.program not in get_args(ProgramKind):
        raise SpecError(f"Unknown program {spec.program!r}. Choose from {', '.join(get_args(ProgramKind))}.")
    for name, minimum in _LEAST.items():
        if (value := getattr(spec, name)) is not None and value < minimum:
            option = "scale_up_after" if name == "scale_up_after_s" else f"--{name.replace('_', '-')}"
            raise SpecError(f"{option} is {value}, but must be at least {minimum}.")
    if spec.array is not None:
        JobArray.parse(spec.array)
    if spec.backend == "slurm" and "\\" in spec.run_dir:
        # Slurm 22.05 reads a backslash as a switch that disables %-symbols; 26.05 drops all backslashes,
        # including doubled backslashes.
        raise SpecError(
            f"The path of the run folder {spec.run_dir!r} (--run-dir, --runs-dir or --name) contains a "
            "backslash, which Slurm removes from the path of the job's log (sbatch --output). Choose another "
            "folder."
        )
    _check_shape(spec)
    _check_time(spec)
    gres = spec.directives.get("gres", "")
    is_gpu = any(resource.partition(":")[0] == "gpu" for resource in gres.split(","))
    if is_gpu and spec.program != "batch":
        raise SpecError(
            f"--gres {gres} requests GPUs. Use --gpus-per-node for GPUs, and --gres for other resources."
        )
    RestartPolicy.with_changes(spec.restart_policy, spec.max_failures)
    check_srun_args(spec.srun_args)
    if spec.container is not None:
        spec.container.check(spec.folders)
    _check_stage(spec)
    if not spec.supervised:
        _check_unsupervised(spec)
    _check_words(spec)


def _check_shape(spec: JobSpec) -> None:
    if not 1 <= spec.min_nodes <= spec.nodes:
        raise SpecError(
            f"The minimum number of nodes is {spec.min_nodes} and the maximum is {spec.nodes} (--nodes), but "
            "a range requires 1 ≤ MIN ≤ MAX, as in 2:4."
        )
    if spec.gpu_type is not None:
        if not _GPU_TYPE.fullmatch(spec.gpu_type):
            raise SpecError(
                f"{spec.gpu_type!r} is not a valid GPU type (--gpus-per-node). Use letters, digits, _, . and "
                "-, and start with a letter or digit, as in h100:8 for eight GPUs of type h100."
            )
        if spec.gpus_per_node == 0:
            raise SpecError(
                f"GPU type {spec.gpu_type} was requested, but the number of GPUs is 0 (--gpus-per-node). "
                "Use a positive number of GPUs, or --gpus-per-node 0 without a type to train on CPUs."
            )
    if spec.gpus_per_node % spec.ntasks_per_node:
        raise SpecError(
            f"There are {spec.gpus_per_node} GPUs (--gpus-per-node) and {spec.ntasks_per_node} ranks "
            "(--ntasks-per-node) per node, but each rank needs the same number of GPUs. Remove "
            "--ntasks-per-node to start one rank per GPU, or set it to a divisor of the number of GPUs."
        )


def _check_time(spec: JobSpec) -> None:
    if not 1 <= spec.stop_before_limit_s <= _MAX_SIGNAL_LEAD_S:
        raise SpecError(
            f"--stop-before-limit is {spec.stop_before_limit_s} s, "
            f"but Slurm accepts 1 to {_MAX_SIGNAL_LEAD_S} s."
        )
    if spec.time_limit_s is not None and spec.time_limit_s <= spec.stop_before_limit_s:
        raise SpecError(
            f"The time limit is {spec.time_limit_s:g} s (--time), but the ranks stop and save "
            f"{spec.stop_before_limit_s} s before the limit (--stop-before-limit), so there is no time to "
            "train. Use a longer --time or a shorter --stop-before-limit."
        )


def _check_stage(spec: JobSpec) -> None:
    for name, source in spec.stage.items():
        if not _STAGED_NAME.fullmatch(name):
            raise SpecError(
                f"{name!r}, the name of the copy of {source!r} (--stage), is not valid. Use letters, digits, "
                "., _ and -, and start with a letter or digit: --stage SRC:NAME."
            )
    if spec.stage_environment and spec.container is not None:
        raise SpecError(
            "The ranks use the Python environment of the container image (--container-image), so it cannot "
            "be staged. Remove --stage-environment."
        )


def _check_unsupervised(spec: JobSpec) -> None:
    if spec.backend == "local":
        raise SpecError(
            "--template plain starts the ranks with srun, but the backend is local (--backend). Submit to "
            "Slurm, or use another template."
        )
    needs_supervisor = {
        f"--nodes {spec.min_nodes}:{spec.nodes}": spec.is_elastic,
        "--spare-nodes": spec.spare_nodes,
        "--array": spec.array,
        "--launcher torchrun": spec.torchrun,
        "--container-image": spec.container,
        "--stage": spec.stage,
        "--stage-environment": spec.stage_environment,
        "--notify": spec.notify.targets,
        "Several ranks per node with several GPUs each": spec.gpus_per_task > 1 and spec.ntasks_per_node > 1,
    }
    for option, is_requested in needs_supervisor.items():
        if is_requested:
            raise SpecError(
                f"{option} needs hpctrain in the job, which --template plain leaves out. Remove one of them."
            )


def _check_words(spec: JobSpec) -> None:
    for name in spec.env:
        if not VARIABLE_NAME.fullmatch(name):
            raise SpecError(
                f"{name!r} (--env) is not a valid name of an environment variable. Use letters, digits and "
                "_, and do not start with a digit."
            )
        if name in _RANK_VARIABLES:
            raise SpecError(
                f"hpctrain sets the variable {name} for each rank, so --env {name}={spec.env[name]} "
                "would have no effect. Remove this option."
            )
    for description, text in (("job name", spec.name), ("run id", spec.run_id)):
        if not text:
            raise SpecError(f"The {description} is empty. Use at least one character.")
    lines, words = _script_texts(spec), _process_texts(spec)
    for description, text in ((key, text) for key, texts in (lines | words).items() for text in texts):
        if description in lines and (match := CONTROL_CHARACTER.search(text)):
            raise SpecError(
                f"The {description} {text!r} contains the control character {match[0]!r}, which is not "
                "allowed in a batch script. Remove this character."
            )
        if "\x00" in text:
            raise SpecError(
                f"The {description} {text!r} contains a NUL character, which cannot be passed to a process. "
                "Remove this character."
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            remedy = "Rename it." if description.startswith("path") else "Change it."
            raise SpecError(
                f"The {description} {text!r} is not valid UTF-8, so it cannot be stored. {remedy}"
            ) from None


def _script_texts(spec: JobSpec) -> dict[str, Sequence[str]]:
    """Return the texts for a line of the batch script, by description."""
    return {
        "job name": [spec.name],
        "path of the run folder": [spec.run_dir],
        "run id": [spec.run_id],
        "path of the interpreter": [spec.python],
        **{f"value of --{key}": [value] for key, value in spec.directives.items()},
        "option": list(spec.directives),
        "template": [spec.template or ""],
        "module": spec.shell.modules,
        "value of --conda": [spec.shell.conda or ""],
        "value of --venv": [spec.shell.venv or ""],
    }


def _process_texts(spec: JobSpec) -> dict[str, Sequence[str]]:
    """Return the texts that are passed to a process without a shell, by description."""
    return {
        "path of the script" if spec.program in ("script", "batch") else spec.program: [spec.script],
        "path of the working directory": [spec.workdir],
        "argument": spec.args,
        "line of --setup": spec.shell.setup,
        "line of teardown": spec.shell.teardown,
        "value of --srun-arg": spec.srun_args,
        "image": [spec.container.image] if spec.container else [],
        "mount": spec.container.mounts if spec.container else [],
        "target of --notify": spec.notify.targets,
        **{f"source of {name} (--stage)": [source] for name, source in spec.stage.items()},
        **{f"value of the variable {name}": [value] for name, value in spec.env.items()},
    }
