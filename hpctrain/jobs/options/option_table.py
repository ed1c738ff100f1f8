"""List all submission options with type and help text.

The command line, `SubmitOptions` in Python, the keys of `hpctrain.yaml`, the output of `hpctrain init` and
the tables of the documentation are generated from this table. The defaults are in `jobspec/job_spec.py`.
"""

# No `from __future__ import annotations`: evaluating string annotations would dominate the import time.
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Literal, TypedDict

from msgspec.structs import replace

from hpctrain.jobs.options.option import Option, OptionType
from hpctrain.jobspec.container import DEFAULT_PYTHON, is_image_file
from hpctrain.jobspec.job_spec import (
    DEFAULT_SNAPSHOT_LIMIT_MB,
    DEFAULT_STOP_BEFORE_LIMIT_S,
    SPEC_DEFAULTS,
    CpuBindingMode,
    GpuRequestStyle,
    MpiPlugin,
    NodeCheckMode,
    ResumeMode,
)
from hpctrain.jobspec.launcher import LauncherName, RendezvousBackend
from hpctrain.jobspec.notify import DEFAULT_STALL_S, NOTIFICATION_KINDS, NotificationKind
from hpctrain.jobspec.shell_setup import is_conda_prefix
from hpctrain.slurm.sbatch_options import SHORT_NAMES

_Path = str | os.PathLike[str]


def is_template_path(value: str) -> bool:
    """True if a value of `template` is a path, not the name of a built-in template."""
    return "/" in value or value.endswith(".j2")


class SbatchOptions(TypedDict, total=False):
    """Common options of sbatch, which are passed on unchanged. All others are accepted, too."""

    account: int | str
    begin: int | str
    comment: int | str
    constraint: int | str
    dependency: int | str
    exclude: int | str
    exclusive: bool | str
    gres: int | str
    hold: bool
    licenses: int | str
    mail_type: int | str
    mail_user: int | str
    mem: int | str
    mem_per_cpu: int | str
    mem_per_gpu: int | str
    nice: int | str
    nodelist: int | str
    partition: int | str
    priority: int | str
    qos: int | str
    reservation: int | str
    switches: int | str
    tmp: int | str
    wckey: int | str


class SubmitOptions(SbatchOptions, total=False):
    """All options of a submission except the script and its arguments."""

    nodes: int | str
    spare_nodes: int
    node_check: NodeCheckMode
    scale_up_after: int
    gpus_per_node: int | str
    gpus_per_task: int
    ntasks_per_node: int
    cpus_per_task: int
    gpu_request_style: GpuRequestStyle
    array: int | str
    name: str
    run_dir: _Path
    runs_dir: _Path
    backend: Literal["auto", "slurm", "local"]
    template: _Path
    env: Mapping[str, str]
    max_failures: int
    restart_policy: Mapping[str, Mapping[str, str]]
    checkpoints: _Path
    standby_workers: int | Literal["never"]
    hang_timeout: int | Literal["never"]
    mpi: MpiPlugin
    srun_arg: Sequence[str]
    cpu_binding: CpuBindingMode
    independent_ranks: bool
    resume_mode: ResumeMode
    code_snapshot: bool
    code_snapshot_limit: int
    module: Sequence[str]
    conda: _Path
    venv: _Path
    setup: Sequence[str]
    teardown: Sequence[str]
    container_image: _Path
    container_runtime: Literal["auto", "pyxis", "apptainer"]
    container_mounts: Sequence[str]
    container_env: Sequence[str]
    container_python: str
    stage: Sequence[str]
    stage_environment: bool
    launcher: LauncherName
    rdzv_backend: RendezvousBackend
    rdzv_endpoint: str
    time: int | str
    stop_before_limit: int
    notify: Sequence[str]
    notify_on: Sequence[NotificationKind]
    notify_stall_after: int
    sbatch: Mapping[str, str]
    config: _Path
    profile: str


#: Help, placeholder and default of each option, by heading. Without a default, that of `JobSpec` applies.
_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "Size": {
        "nodes": Option(
            "Number of nodes. MIN:MAX uses as many as are available, and continues if some fail.", "N|MIN:MAX"
        ),
        "spare_nodes": Option("Number of nodes that replace failed nodes without queueing again.", "N"),
        "node_check": Option(
            "Check the nodes before the ranks start, and skip bad nodes. auto checks only after a failure of "
            "a GPU or of communication, or a hang."
        ),
        "scale_up_after": Option(
            "Seconds after which a run on fewer than MAX nodes looks for more. 0 disables the search.",
            "SECONDS",
        ),
        "gpus_per_node": Option(
            "GPUs per node, optionally with a type, as in h100:8. 0 uses only CPUs.", "[TYPE:]G"
        ),
        "gpus_per_task": Option(
            "GPUs per rank. With several, a rank can use dp, ddp2 or device_map, or start processes.",
            "G",
            default_text="1 for runs on GPUs",
        ),
        "ntasks_per_node": Option(
            "Ranks per node. With fewer ranks than GPUs, each rank has several GPUs.",
            "T",
            default_text="one per GPU; 1 for runs on CPUs",
        ),
        "cpus_per_task": Option(
            "CPUs per rank.", "C", default_text="for GPU jobs on Slurm, the share of the GPUs", example="8"
        ),
        "gpu_request_style": Option("sbatch option that requests GPUs at this site."),
        "array": Option(
            "Submit a job array: one run per task number ($HPCTRAIN_ARRAY_TASK_ID), at most LIMIT at a time.",
            "TASKS[%LIMIT]",
            example="0-19%4",
        ),
    },
    "Run": {
        "name": Option("Job name.", default_text="the name of the script"),
        "run_dir": Option(
            "Run folder. Pass that of an ended run to resume it.", "PATH", default_text="<runs-dir>/<run id>"
        ),
        "runs_dir": Option("Parent of the run folder, unless --run-dir is given.", "PATH", "runs"),
        "backend": Option("Where to run. auto uses Slurm if it is available.", default="auto"),
        "template": Option(
            "Template of the batch script: a name, or a path that contains / or ends in .j2. plain starts "
            "the ranks without hpctrain.",
            "NAME|PATH",
            default_text="ddp; cpu for runs on CPUs; torchrun with --launcher torchrun",
        ),
        "env": Option(
            "Environment variable for the ranks. NAME alone copies the current value.",
            "NAME[=VALUE]",
            example="NCCL_DEBUG: INFO",
        ),
        "max_failures": Option("Give up after N consecutive crashes without a new checkpoint.", "N"),
        "restart_policy": Option(
            "Override a limit of the restart policy, such as oom.retries=3.",
            "KIND.FIELD=N",
            example="oom: {retries: 0}",
        ),
        "checkpoints": Option(
            "Files that the script saves as checkpoints, such as 'out/*.pt', if not in the run folder. New "
            "ones count as progress.",
            "GLOB",
            example="out/*.pt",
        ),
        "standby_workers": Option(
            "After SECONDS of training, start standby workers, which make restarts fast and use about 250 MB "
            "of memory each.",
            "SECONDS|never",
        ),
        "hang_timeout": Option(
            "Restart the run if no rank makes progress for SECONDS or for ten times the longest step so far, "
            "whichever is longer.",
            "SECONDS|never",
        ),
        "mpi": Option("Slurm's MPI plugin (srun --mpi), for programs that use MPI or mpi4py."),
        "srun_arg": Option(
            "Option for the srun that starts the ranks, such as --cpu-bind=cores.",
            "OPTION",
            example="[--cpu-bind=cores]",
        ),
        "cpu_binding": Option(
            "Bind each rank to the CPUs next to its GPU, unless Slurm binds the ranks. none disables this."
        ),
        "independent_ranks": Option(
            "Allow ranks to train without a process group, each by itself. Otherwise, such a run fails."
        ),
        "resume_mode": Option(
            "How an interrupted run continues: requeue (in the same job) or successor (in a new job). auto "
            "requeues if the site allows it."
        ),
    },
    "Code": {
        "code_snapshot": Option(
            "Copy the working tree (tracked, changed and new files) into the run folder and run the copy.",
            default_text="yes",
        ),
        "code_snapshot_limit": Option(
            "Maximum size of the code snapshot, in MB.", "MB", DEFAULT_SNAPSHOT_LIMIT_MB
        ),
    },
    "Environment setup": {
        "module": Option("Environment module to load.", "NAME", example="[cuda/12.4, nccl]"),
        "conda": Option(
            "Conda environment to activate. It must contain hpctrain.", "NAME|PATH", example="torch"
        ),
        "venv": Option(
            "Virtual environment to activate. It must contain hpctrain.", "PATH", example="~/envs/torch"
        ),
        "setup": Option(
            "Shell line to run in the batch script, in the working directory.",
            "LINE",
            example="[ulimit -c 0]",
        ),
        "teardown": Option(
            "Shell line to run after the supervisor has exited.",
            "LINE",
            example="[rm -rf /scratch/$USER/cache]",
        ),
    },
    "Container": {
        "container_image": Option(
            "Run the ranks in a container: an image file or an image URL.",
            "IMAGE",
            example="docker://nvcr.io/nvidia/pytorch:25.03-py3",
        ),
        "container_runtime": Option("Container runtime. auto uses that of the site.", default="auto"),
        "container_mounts": Option(
            "Additional bind mounts.", "SRC:DST[:ro],…", example="[/scratch:/scratch, ~/data:/data:ro]"
        ),
        "container_env": Option(
            "Environment variables of the job that override those of the image, as --env always does.",
            "NAME,…",
            example="[HF_HOME]",
        ),
        "container_python": Option("Python in the container (3.11 or newer).", "PATH", DEFAULT_PYTHON),
    },
    "Local disks": {
        "stage": Option(
            "Copy a file or folder, or unpack an archive, to $HPCTRAIN_STAGE/NAME on each node's local disk.",
            "SRC[:NAME]",
            example="[data/imagenet.tar, ~/tokens.bin:tokens]",
        ),
        "stage_environment": Option(
            "Start the ranks from copies of the Python environment and the code on each node's local disk."
        ),
    },
    "Launcher": {
        "launcher": Option(
            "Program that starts the ranks: srun, or torchrun with one agent per node.",
            default_text="srun, or torchrun with --template torchrun",
        ),
        "rdzv_backend": Option("Rendezvous backend of the torchrun agents.", default_text="c10d"),
        "rdzv_endpoint": Option(
            "Address of the etcd server for the rendezvous.", "HOST:PORT", example="etcd.site:2379"
        ),
    },
    "Time": {
        "time": Option(
            "Time limit of the job: minutes, HH:MM:SS, D-HH:MM:SS, or unlimited.",
            "TIME",
            default_text="the limit of the partition",
            example="12:00:00",
        ),
        "stop_before_limit": Option(
            "Seconds before the time limit at which the ranks are told to save a checkpoint and stop.",
            "SECONDS",
            default_text=f"{DEFAULT_STOP_BEFORE_LIMIT_S}, or a third of the time limit if shorter",
        ),
    },
    "Notifications": {
        "notify": Option(
            "Webhook URL to call or shell command to run when the run finishes, fails or stalls.",
            "URL|COMMAND",
            example="[https://hooks.example.org/T123, mail -s hpctrain me@example.org]",
        ),
        "notify_on": Option(
            "Events to notify about.",
            "EVENT",
            default_text=", ".join(NOTIFICATION_KINDS),
            example="[failure, stall]",
        ),
        "notify_stall_after": Option(
            "Seconds without a logged step that count as a stall.", "SECONDS", DEFAULT_STALL_S
        ),
    },
    "Options of sbatch": {
        "sbatch": Option(
            "Option to pass to sbatch. The options of sbatch below need no --sbatch.",
            "KEY[=VALUE]",
            example="hint: nomultithread",
        )
    },
    "Configuration files": {
        "config": Option(
            "Additional configuration file, which overrides all others.", "FILE", in_files=False
        ),
        "profile": Option("Profile of the configuration files to apply.", "NAME", in_files=False),
    },
}
#: Options without a flag: for files, Python and `--set`.
_WITHOUT_FLAG = frozenset(
    {
        *("node_check", "scale_up_after", "gpu_request_style", "cpu_binding", "code_snapshot_limit"),
        *("container_runtime", "container_env", "container_python", "rdzv_backend", "rdzv_endpoint"),
        *("notify_on", "notify_stall_after", "teardown"),
    }
)
#: Predicates for values that are paths; in a file, they are relative to its folder.
_IS_PATH: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(("run_dir", "runs_dir", "venv", "checkpoints", "container_mounts", "stage"), bool),
    "template": is_template_path,
    "conda": is_conda_prefix,
    "container_image": is_image_file,
}


@cache
def all_options() -> dict[str, Option]:
    """Return all options of hpctrain itself by name, in display order."""
    short_names = {long: f"-{short}" for short, long in SHORT_NAMES.items()}
    options = {}
    for group, members in _OPTIONS.items():
        for name, option in members.items():
            kind = OptionType.from_hint(SubmitOptions.__annotations__[name])
            choices = "" if kind.text else "|".join(kind.choices)
            default = option.default
            if default is None and not option.default_text:
                default = SPEC_DEFAULTS.get(name, SPEC_DEFAULTS.get(f"{name}_s"))
            text = "" if default is None else "no" if default is False else str(default)
            options[name] = replace(
                option,
                name=name,
                group=group,
                kind=kind,
                metavar="" if kind.flag else option.metavar or choices or name.upper(),
                default=default,
                default_text=option.default_text or text,
                on_command_line=name not in _WITHOUT_FLAG,
                is_path=_IS_PATH.get(name),
                short=short_names.get("job-name" if name == "name" else name.replace("_", "-"), ""),
            )
    return options
