"""The table of all submission options: name, type and help text.

The command line, `SubmitOptions` in Python, the keys of `hpctrain.yaml`, the output of `hpctrain init` and
the tables of the documentation are generated from it.
"""

# No `from __future__ import annotations`: evaluating string annotations would dominate the import time.
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Literal, TypedDict

from hpctrain.jobs.options.option import Option, OptionInfo, OptionType
from hpctrain.jobspec.container import Container, is_image_file
from hpctrain.jobspec.directives import SHORT_NAMES
from hpctrain.jobspec.job_spec import (
    DEFAULT_SNAPSHOT_LIMIT_MB,
    DEFAULT_STOP_BEFORE_LIMIT_S,
    CpuBindingMode,
    GpuRequestStyle,
    JobSpec,
    MpiPlugin,
    NodeCheckMode,
    ResumeMode,
)
from hpctrain.jobspec.launcher import LauncherName, RendezvousBackend, TorchrunConfig
from hpctrain.jobspec.notify import DEFAULT_STALL_S, NOTIFICATION_KINDS, NotificationKind
from hpctrain.jobspec.shell_setup import is_conda_prefix

_Path = str | os.PathLike[str]


def is_template_path(value: str) -> bool:
    """True if a value of `template` is a path, not the name of a built-in template."""
    return "/" in value or value.endswith(".j2")


class SbatchOptions(TypedDict, total=False):
    """Options that are passed to sbatch unchanged: those of sbatch(1), from Slurm 20.11 to 25.05."""

    account: int | str
    acctg_freq: int | str
    batch: int | str
    bb: int | str
    bbf: int | str
    begin: int | str
    bell: int | str
    cluster_constraint: int | str
    comment: int | str
    consolidate_segments: int | str
    constraint: int | str
    container: int | str
    container_id: int | str
    contiguous: bool
    core_spec: int | str
    cores_per_socket: int | str
    cpu_freq: int | str
    deadline: int | str
    delay_boot: int | str
    dependency: int | str
    distribution: int | str
    exclude: int | str
    exclusive: bool | str
    extra: int | str
    extra_node_info: int | str
    get_user_env: int | str
    gid: int | str
    gpu_bind: int | str
    gpu_freq: int | str
    gres: int | str
    gres_flags: int | str
    hint: int | str
    hold: bool
    ignore_pbs: bool
    immediate: int | str
    kill_on_invalid_dep: int | str
    licenses: int | str
    mail_type: int | str
    mail_user: int | str
    mcs_label: int | str
    mem: int | str
    mem_bind: int | str
    mem_per_cpu: int | str
    mem_per_gpu: int | str
    mincpus: int | str
    network: int | str
    nice: int | str
    no_bell: bool
    nodelist: int | str
    overcommit: bool
    oversubscribe: bool
    partition: int | str
    power: int | str
    prefer: int | str
    priority: int | str
    propagate: int | str
    qos: int | str
    reboot: bool
    reservation: int | str
    resv_ports: int | str
    segment: int | str
    sockets_per_node: int | str
    spread_job: bool
    stepmgr: bool
    switches: int | str
    thread_spec: int | str
    threads_per_core: int | str
    time_min: int | str
    tmp: int | str
    tres_bind: int | str
    tres_per_job: int | str
    tres_per_task: int | str
    uid: int | str
    use_min_nodes: bool
    wait_all_nodes: int | str
    wckey: int | str
    x11: bool | str


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
_OPTIONS: Mapping[str, Mapping[str, OptionInfo]] = {
    "Size": {
        "nodes": OptionInfo(
            "Number of nodes. With MIN:MAX, the run uses as many as are available, and continues if some "
            "fail.",
            "N|MIN:MAX",
        ),
        "spare_nodes": OptionInfo(
            "Number of spare nodes, which replace failed nodes without queueing again.", "N"
        ),
        "node_check": OptionInfo(
            "Check the health of the nodes before the ranks start, and skip bad nodes. auto checks only "
            "after a GPU failure, a communication failure or a hang."
        ),
        "scale_up_after": OptionInfo(
            "Seconds after which a run on fewer than MAX nodes looks for more nodes. 0 disables the search.",
            "SECONDS",
        ),
        "gpus_per_node": OptionInfo(
            "GPUs per node, optionally with a type, as in h100:8. 0 uses only CPUs.", "[TYPE:]G"
        ),
        "gpus_per_task": OptionInfo(
            "GPUs per rank. With several, a rank can use dp, ddp2 or device_map, or start processes.",
            "G",
            default_words="1 for runs on GPUs",
        ),
        "ntasks_per_node": OptionInfo(
            "Ranks per node. With fewer ranks than GPUs, each rank has several GPUs.",
            "T",
            default_words="one per GPU; 1 for runs on CPUs",
        ),
        "cpus_per_task": OptionInfo(
            "CPUs per rank.", "C", default_words="for GPU jobs on Slurm, the share of the GPUs", example="8"
        ),
        "gpu_request_style": OptionInfo("sbatch option that requests GPUs at this site."),
        "array": OptionInfo(
            "Submit a job array: one run per task number ($HPCTRAIN_ARRAY_TASK_ID), at most LIMIT at a time.",
            "TASKS[%LIMIT]",
            example="0-19%4",
        ),
    },
    "Run": {
        "name": OptionInfo("Job name.", default_words="the name of the script"),
        "run_dir": OptionInfo(
            "Run folder. To resume a finished or failed run, pass its folder.",
            "PATH",
            default_words="<runs-dir>/<run id>",
        ),
        "runs_dir": OptionInfo(
            "Folder in which the run folder is created, unless --run-dir is given.", "PATH", default="runs"
        ),
        "backend": OptionInfo("Where to run. auto uses Slurm if it is available.", default="auto"),
        "template": OptionInfo(
            "Template of the batch script: a name, or a path that contains / or ends in .j2. plain starts "
            "the ranks without hpctrain.",
            "NAME|PATH",
            default_words="ddp; cpu for runs on CPUs; torchrun with --launcher torchrun",
        ),
        "env": OptionInfo(
            "Environment variable for the ranks. NAME alone copies the current value.",
            "NAME[=VALUE]",
            example="NCCL_DEBUG: INFO",
        ),
        "max_failures": OptionInfo("Give up after N consecutive crashes without a new checkpoint.", "N"),
        "restart_policy": OptionInfo(
            "Override a limit of the restart policy, such as oom.retries=3.",
            "KIND.FIELD=N",
            example="oom: {retries: 0}",
        ),
        "standby_workers": OptionInfo(
            "After SECONDS of training, start standby workers, which make restarts fast and use about 250 MB "
            "of memory each.",
            "SECONDS|never",
        ),
        "hang_timeout": OptionInfo(
            "Restart the run if no rank makes progress for SECONDS or for ten times the longest step so far, "
            "whichever is longer.",
            "SECONDS|never",
        ),
        "mpi": OptionInfo("Slurm's MPI plugin (srun --mpi), for programs that use MPI or mpi4py."),
        "srun_arg": OptionInfo(
            "Option for the srun that starts the ranks, such as --cpu-bind=cores.",
            "OPTION",
            example="[--cpu-bind=cores]",
        ),
        "cpu_binding": OptionInfo(
            "Bind each rank to the CPUs next to its GPU, unless Slurm binds the ranks. none disables this "
            "binding."
        ),
        "independent_ranks": OptionInfo(
            "Allow ranks to train without a process group, each by itself. Otherwise, such a run fails."
        ),
        "resume_mode": OptionInfo(
            "How an interrupted run continues: requeue (in the same job) or successor (in a new job). auto "
            "requeues if the site allows it."
        ),
    },
    "Code": {
        "code_snapshot": OptionInfo(
            "Copy the working tree (tracked, changed and new files) into the run folder and run the copy.",
            default_words="yes",
        ),
        "code_snapshot_limit": OptionInfo(
            "Maximum size of the code snapshot, in MB.", "MB", default=DEFAULT_SNAPSHOT_LIMIT_MB
        ),
    },
    "Environment setup": {
        "module": OptionInfo("Environment module to load.", "NAME", example="[cuda/12.4, nccl]"),
        "conda": OptionInfo(
            "Conda environment to activate. hpctrain must be installed in it.", "NAME|PATH", example="torch"
        ),
        "venv": OptionInfo(
            "Virtual environment to activate. hpctrain must be installed in it.",
            "PATH",
            example="~/envs/torch",
        ),
        "setup": OptionInfo(
            "Shell line to run verbatim in the batch script, in the working directory.",
            "LINE",
            example="[ulimit -c 0]",
        ),
        "teardown": OptionInfo(
            "Shell line to run in the batch script after the supervisor has exited.",
            "LINE",
            example="[rm -rf /scratch/$USER/cache]",
        ),
    },
    "Container": {
        "container_image": OptionInfo(
            "Run the ranks in a container: an image file or an image URL.",
            "IMAGE",
            example="docker://nvcr.io/nvidia/pytorch:25.03-py3",
        ),
        "container_runtime": OptionInfo(
            "Container runtime. auto uses the runtime that the site provides.", default="auto"
        ),
        "container_mounts": OptionInfo(
            "Additional bind mounts.", "SRC:DST[:ro],…", example="[/scratch:/scratch, ~/data:/data:ro]"
        ),
        "container_env": OptionInfo(
            "Environment variables of the job that override those of the image. Variables set with --env "
            "always override the image and need not be listed.",
            "NAME,…",
            example="[HF_HOME]",
        ),
        "container_python": OptionInfo(
            "Python interpreter in the container (3.11 or newer).", "PATH", default=Container.python
        ),
    },
    "Local disks": {
        "stage": OptionInfo(
            "Copy a file or folder, or unpack an archive, to $HPCTRAIN_STAGE/NAME on the local disk of each "
            "node.",
            "SRC[:NAME]",
            example="[data/imagenet.tar, ~/tokens.bin:tokens]",
        ),
        "stage_environment": OptionInfo(
            "Copy the Python environment and the code to the local disk of each node, and start the ranks "
            "from there."
        ),
    },
    "Launcher": {
        "launcher": OptionInfo(
            "Program that starts the ranks: srun, or torchrun with one agent per node.",
            default_words="srun, or torchrun with --template torchrun",
        ),
        "rdzv_backend": OptionInfo(
            "Rendezvous backend of the torchrun agents.", default_words=TorchrunConfig.rdzv_backend
        ),
        "rdzv_endpoint": OptionInfo(
            "Address of the etcd server for the rendezvous.", "HOST:PORT", example="etcd.site:2379"
        ),
    },
    "Time": {
        "time": OptionInfo(
            "Time limit of the job: minutes, HH:MM:SS, D-HH:MM:SS, or unlimited.",
            "TIME",
            default_words="the limit of the partition",
            example="12:00:00",
        ),
        "stop_before_limit": OptionInfo(
            "Seconds before the time limit at which the ranks are told to save a checkpoint and stop.",
            "SECONDS",
            default_words=f"{DEFAULT_STOP_BEFORE_LIMIT_S}, or a third of the time limit if shorter",
        ),
    },
    "Notifications": {
        "notify": OptionInfo(
            "Webhook URL to call or shell command to run when the run finishes, fails or stalls.",
            "URL|COMMAND",
            example="[https://hooks.example.org/T123, mail -s hpctrain me@example.org]",
        ),
        "notify_on": OptionInfo(
            "Events to notify about: finish, failure or stall.",
            "EVENT",
            default_words=", ".join(NOTIFICATION_KINDS),
            example="[failure, stall]",
        ),
        "notify_stall_after": OptionInfo(
            "Seconds without a logged step after which a run counts as stalled.",
            "SECONDS",
            default=DEFAULT_STALL_S,
        ),
    },
    "Options of sbatch": {
        "sbatch": OptionInfo(
            "Option to pass to sbatch. The options of sbatch below need no --sbatch.",
            "KEY[=VALUE]",
            example="hint: nomultithread",
        )
    },
    "Configuration files": {
        "config": OptionInfo(
            "Additional configuration file, which overrides all others.", "FILE", in_files=False
        ),
        "profile": OptionInfo(
            "Profile to apply, from the profiles section of the configuration files.", "NAME", in_files=False
        ),
    },
}
#: Options without a flag: for files, Python and `--set`.
_WITHOUT_FLAG = frozenset(
    {
        *("node_check", "scale_up_after", "gpu_request_style", "cpu_binding", "code_snapshot_limit"),
        *("container_runtime", "container_env", "container_python", "rdzv_backend", "rdzv_endpoint"),
        *("notify_on", "notify_stall_after"),
    }
)
#: Predicates for values that are paths; in a file, they are relative to its folder.
_IS_PATH: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(("run_dir", "runs_dir", "venv", "container_mounts", "stage"), bool),
    "template": is_template_path,
    "conda": is_conda_prefix,
    "container_image": is_image_file,
}


@cache
def sbatch_options() -> dict[str, str]:
    """Return the long name of each option that is passed to sbatch, by its name in Python."""
    return {name: name.replace("_", "-") for name in SbatchOptions.__annotations__}


def sbatch_type(name: str) -> OptionType:
    """Return the type of an option of sbatch, given with `-` or `_`."""
    return OptionType.from_hint(SbatchOptions.__annotations__.get(name.replace("-", "_"), str))


@cache
def all_options() -> dict[str, Option]:
    """Return all options of hpctrain itself by name, in display order."""
    short_names = {long: f"-{short}" for short, long in SHORT_NAMES.items()}
    options = {}
    for group, infos in _OPTIONS.items():
        for name, info in infos.items():
            if not info.default_words and info.default is None:
                info = info._replace(default=getattr(JobSpec, name, getattr(JobSpec, f"{name}_s", None)))
            info = info._replace(
                on_command_line=name not in _WITHOUT_FLAG,
                is_path=_IS_PATH.get(name),
                short=short_names.get("job-name" if name == "name" else name.replace("_", "-"), ""),
            )
            kind = OptionType.from_hint(SubmitOptions.__annotations__[name])
            options[name] = Option(name, group, kind, info)
    return options
