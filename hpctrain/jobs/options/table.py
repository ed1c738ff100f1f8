"""The table of all submission options: name, type and help text.

The command line, `SubmitOptions` in Python, the keys of `hpctrain.yaml`, the output of `hpctrain init` and
the tables of the documentation are generated from it. To add an option, add a field to a group below.
"""

# No `from __future__ import annotations`: evaluating string annotations would dominate the import time.
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Literal, TypedDict

from hpctrain.jobs.options.option import Option, OptionInfo, OptionType
from hpctrain.spec.container import Container, is_image_file
from hpctrain.spec.job_spec import (
    DEFAULT_SNAPSHOT_LIMIT_MB,
    DEFAULT_STOP_BEFORE_LIMIT_S,
    CpuBindingMode,
    GpuRequestStyle,
    JobSpec,
    MpiPlugin,
    NodeCheckMode,
    ResumeMode,
)
from hpctrain.spec.launcher import LauncherName, RendezvousBackend, TorchrunConfig
from hpctrain.spec.notify import DEFAULT_STALL_S, NOTIFICATION_KINDS
from hpctrain.spec.shell_setup import is_conda_prefix


def is_template_path(value: str) -> bool:
    """True if a value of `template` is a path, not the name of a built-in template."""
    return "/" in value or value.endswith(".j2")


class _Size(TypedDict, total=False):
    """Size."""

    nodes: Annotated[
        int | str,
        OptionInfo(
            short="-N",
            metavar="N|MIN:MAX",
            default=JobSpec.nodes,
            help="Number of nodes. With MIN:MAX, the run uses as many as are available, and continues if "
            "some fail.",
        ),
    ]
    spare_nodes: Annotated[
        int,
        OptionInfo(
            metavar="N",
            default=JobSpec.spare_nodes,
            help="Number of spare nodes, which replace failed nodes without queueing again.",
        ),
    ]
    node_check: Annotated[
        NodeCheckMode,
        OptionInfo(
            on_command_line=False,
            default=JobSpec.node_check,
            help="Check the health of the nodes before the ranks start, and skip bad nodes. auto checks "
            "only after a GPU failure, a communication failure or a hang.",
        ),
    ]
    scale_up_after: Annotated[
        int,
        OptionInfo(
            on_command_line=False,
            metavar="SECONDS",
            default=JobSpec.scale_up_after_s,
            help="Seconds after which a run on fewer than MAX nodes looks for more nodes. 0 disables the "
            "search.",
        ),
    ]
    gpus_per_node: Annotated[
        int | str,
        OptionInfo(
            metavar="[TYPE:]G",
            default=JobSpec.gpus_per_node,
            help="GPUs per node, optionally with a type, as in h100:8. 0 uses only CPUs.",
        ),
    ]
    gpus_per_task: Annotated[
        int,
        OptionInfo(
            metavar="G",
            default_words="1 for runs on GPUs",
            help="GPUs per rank. With several, a rank can use dp, ddp2 or device_map, or start processes.",
        ),
    ]
    ntasks_per_node: Annotated[
        int,
        OptionInfo(
            metavar="T",
            default_words="one per GPU; 1 for runs on CPUs",
            help="Ranks per node. With fewer ranks than GPUs, each rank has several GPUs.",
        ),
    ]
    cpus_per_task: Annotated[
        int,
        OptionInfo(
            short="-c",
            metavar="C",
            example="8",
            default_words="for GPU jobs on Slurm, the share of the GPUs",
            help="CPUs per rank.",
        ),
    ]
    gpu_request_style: Annotated[
        GpuRequestStyle,
        OptionInfo(
            on_command_line=False,
            default=JobSpec.gpu_request_style,
            help="sbatch option that requests GPUs at this site.",
        ),
    ]
    array: Annotated[
        int | str,
        OptionInfo(
            short="-a",
            metavar="TASKS[%LIMIT]",
            example="0-19%4",
            help="Submit a job array: one run per task number ($HPCTRAIN_ARRAY_TASK_ID), at most LIMIT at "
            "a time.",
        ),
    ]


class _Run(TypedDict, total=False):
    """Run."""

    name: Annotated[
        str,
        OptionInfo(short="-J", default_words="the name of the script", help="Job name."),
    ]
    run_dir: Annotated[
        str | os.PathLike[str],
        OptionInfo(
            metavar="PATH",
            default_words="<runs-dir>/<run id>",
            help="Run folder. To resume a finished or failed run, pass its folder.",
            is_path=lambda _: True,
        ),
    ]
    runs_dir: Annotated[
        str | os.PathLike[str],
        OptionInfo(
            metavar="PATH",
            default="runs",
            help="Folder in which the run folder is created, unless --run-dir is given.",
            is_path=lambda _: True,
        ),
    ]
    backend: Annotated[
        Literal["auto", "slurm", "local"],
        OptionInfo(
            default="auto",
            help="Where to run. auto uses Slurm if it is available.",
        ),
    ]
    template: Annotated[
        str | os.PathLike[str],
        OptionInfo(
            metavar="NAME|PATH",
            default_words="ddp; cpu for runs on CPUs; torchrun with --launcher torchrun",
            help="Template of the batch script: a name, or a path that contains / or ends in .j2. plain "
            "starts the ranks without hpctrain.",
            is_path=is_template_path,
        ),
    ]
    env: Annotated[
        Mapping[str, str],
        OptionInfo(
            metavar="NAME[=VALUE]",
            example="NCCL_DEBUG: INFO",
            help="Environment variable for the ranks. NAME alone copies the current value.",
        ),
    ]
    max_failures: Annotated[
        int,
        OptionInfo(
            metavar="N",
            default=JobSpec.max_failures,
            help="Give up after N consecutive crashes without a new checkpoint.",
        ),
    ]
    restart_policy: Annotated[
        Mapping[str, Mapping[str, str]],
        OptionInfo(
            metavar="KIND.FIELD=N",
            example="oom: {retries: 0}",
            help="Override a limit of the restart policy, such as oom.retries=3.",
        ),
    ]
    standby_workers: Annotated[
        int | Literal["never"],
        OptionInfo(
            metavar="SECONDS|never",
            default=JobSpec.standby_workers_s,
            help="After SECONDS of training, start standby workers, which make restarts fast and use about "
            "250 MB of memory each.",
        ),
    ]
    hang_timeout: Annotated[
        int | Literal["never"],
        OptionInfo(
            metavar="SECONDS|never",
            default=JobSpec.hang_timeout_s,
            help="Restart the run if no rank makes progress for SECONDS or for ten times the longest step so "
            "far, whichever is longer.",
        ),
    ]
    mpi: Annotated[
        MpiPlugin,
        OptionInfo(
            default=JobSpec.mpi,
            help="Slurm's MPI plugin (srun --mpi), for programs that use MPI or mpi4py.",
        ),
    ]
    srun_arg: Annotated[
        Sequence[str],
        OptionInfo(
            metavar="OPTION",
            example="[--cpu-bind=cores]",
            help="Option for the srun that starts the ranks, such as --cpu-bind=cores.",
        ),
    ]
    cpu_binding: Annotated[
        CpuBindingMode,
        OptionInfo(
            on_command_line=False,
            default=JobSpec.cpu_binding,
            help="Bind each rank to the CPUs next to its GPU, unless Slurm binds the ranks. none disables "
            "this binding.",
        ),
    ]
    independent_ranks: Annotated[
        bool,
        OptionInfo(
            default=JobSpec.independent_ranks,
            default_words="no",
            help="Allow ranks to train without a process group, each by itself. Otherwise, such a run fails.",
        ),
    ]
    resume_mode: Annotated[
        ResumeMode,
        OptionInfo(
            default=JobSpec.resume_mode,
            help="How an interrupted run continues: requeue (in the same job) or successor (in a new job). "
            "auto requeues if the site allows it.",
        ),
    ]


class _Code(TypedDict, total=False):
    """Code."""

    code_snapshot: Annotated[
        bool,
        OptionInfo(
            default_words="yes",
            help="Copy the working tree (tracked, changed and new files) into the run folder and run "
            "the copy.",
        ),
    ]
    code_snapshot_limit: Annotated[
        int,
        OptionInfo(
            on_command_line=False,
            metavar="MB",
            default=DEFAULT_SNAPSHOT_LIMIT_MB,
            help="Maximum size of the code snapshot, in MB.",
        ),
    ]


class _Shell(TypedDict, total=False):
    """Environment setup."""

    module: Annotated[
        Sequence[str],
        OptionInfo(metavar="NAME", example="[cuda/12.4, nccl]", help="Environment module to load."),
    ]
    conda: Annotated[
        str | os.PathLike[str],
        OptionInfo(
            metavar="NAME|PATH",
            example="torch",
            help="Conda environment to activate. hpctrain must be installed in it.",
            is_path=is_conda_prefix,
        ),
    ]
    venv: Annotated[
        str | os.PathLike[str],
        OptionInfo(
            metavar="PATH",
            example="~/envs/torch",
            help="Virtual environment to activate. hpctrain must be installed in it.",
            is_path=lambda _: True,
        ),
    ]
    setup: Annotated[
        Sequence[str],
        OptionInfo(
            metavar="LINE",
            example="[ulimit -c 0]",
            help="Shell line to run verbatim in the batch script, in the working directory.",
        ),
    ]
    teardown: Annotated[
        Sequence[str],
        OptionInfo(
            metavar="LINE",
            example="[rm -rf /scratch/$USER/cache]",
            help="Shell line to run in the batch script after the supervisor has exited.",
        ),
    ]


class _Container(TypedDict, total=False):
    """Container."""

    container_image: Annotated[
        str | os.PathLike[str],
        OptionInfo(
            metavar="IMAGE",
            example="docker://nvcr.io/nvidia/pytorch:25.03-py3",
            help="Run the ranks in a container: an image file or an image URL.",
            is_path=is_image_file,
        ),
    ]
    container_runtime: Annotated[
        Literal["auto", "pyxis", "apptainer"],
        OptionInfo(
            on_command_line=False,
            default="auto",
            help="Container runtime. auto uses the runtime that the site provides.",
        ),
    ]
    container_mounts: Annotated[
        Sequence[str],
        OptionInfo(
            metavar="SRC:DST[:ro],…",
            example="[/scratch:/scratch, ~/data:/data:ro]",
            help="Additional bind mounts.",
            is_path=lambda _: True,
        ),
    ]
    container_env: Annotated[
        Sequence[str],
        OptionInfo(
            on_command_line=False,
            metavar="NAME,…",
            example="[HF_HOME]",
            help="Environment variables of the job that override those of the image. Variables set with "
            "--env always override the image and need not be listed.",
        ),
    ]
    container_python: Annotated[
        str,
        OptionInfo(
            on_command_line=False,
            metavar="PATH",
            default=Container.python,
            help="Python interpreter in the container (3.11 or newer).",
        ),
    ]


class _Stage(TypedDict, total=False):
    """Local disks."""

    stage: Annotated[
        Sequence[str],
        OptionInfo(
            metavar="SRC[:NAME]",
            example="[data/imagenet.tar, ~/tokens.bin:tokens]",
            help="Copy a file or folder, or unpack an archive, to $HPCTRAIN_STAGE/NAME on the local disk of "
            "each node.",
            is_path=lambda _: True,
        ),
    ]
    stage_environment: Annotated[
        bool,
        OptionInfo(
            default=JobSpec.stage_environment,
            default_words="no",
            help="Copy the Python environment and the code to the local disk of each node, and start the "
            "ranks from there.",
        ),
    ]


class _Launch(TypedDict, total=False):
    """Launcher."""

    launcher: Annotated[
        LauncherName,
        OptionInfo(
            default_words="srun, or torchrun with --template torchrun",
            help="Program that starts the ranks: srun, or torchrun with one agent per node.",
        ),
    ]
    rdzv_backend: Annotated[
        RendezvousBackend,
        OptionInfo(
            on_command_line=False,
            default_words=TorchrunConfig.rdzv_backend,
            help="Rendezvous backend of the torchrun agents.",
        ),
    ]
    rdzv_endpoint: Annotated[
        str,
        OptionInfo(
            on_command_line=False,
            metavar="HOST:PORT",
            example="etcd.site:2379",
            help="Address of the etcd server for the rendezvous.",
        ),
    ]


class _Time(TypedDict, total=False):
    """Time."""

    time: Annotated[
        int | str,
        OptionInfo(
            short="-t",
            metavar="TIME",
            example="12:00:00",
            default_words="the limit of the partition",
            help="Time limit of the job: minutes, HH:MM:SS, D-HH:MM:SS, or unlimited.",
        ),
    ]
    stop_before_limit: Annotated[
        int,
        OptionInfo(
            metavar="SECONDS",
            default_words=f"{DEFAULT_STOP_BEFORE_LIMIT_S}, or a third of the time limit if shorter",
            help="Seconds before the time limit at which the ranks are told to save a checkpoint and stop.",
        ),
    ]


class _Notify(TypedDict, total=False):
    """Notifications."""

    notify: Annotated[
        Sequence[str],
        OptionInfo(
            metavar="URL|COMMAND",
            example="[https://hooks.example.org/T123, mail -s hpctrain me@example.org]",
            help="Webhook URL to call or shell command to run when the run finishes, fails or stalls.",
        ),
    ]
    notify_on: Annotated[
        Sequence[str],
        OptionInfo(
            on_command_line=False,
            metavar="EVENT",
            example="[failure, stall]",
            default_words=", ".join(NOTIFICATION_KINDS),
            help="Events to notify about: finish, failure or stall.",
        ),
    ]
    notify_stall_after: Annotated[
        int,
        OptionInfo(
            on_command_line=False,
            metavar="SECONDS",
            default=DEFAULT_STALL_S,
            help="Seconds without a logged step after which a run counts as stalled.",
        ),
    ]


class SbatchOptions(TypedDict, total=False):
    """Options that are passed to sbatch unchanged: those of sbatch(1), from Slurm 20.11 to 25.05.

    A `bool` is a flag. sbatch's --profile is missing, because hpctrain has an option of that name.
    """

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


class _Rest(TypedDict, total=False):
    """Options of sbatch."""

    sbatch: Annotated[
        Mapping[str, str],
        OptionInfo(
            metavar="KEY[=VALUE]",
            example="{partition: gpu, hint: nomultithread}",
            help="Option to pass to sbatch. The options of sbatch below need no --sbatch.",
        ),
    ]


class _Sources(TypedDict, total=False):
    """Configuration files."""

    config: Annotated[
        str | os.PathLike[str],
        OptionInfo(
            metavar="FILE", in_files=False, help="Additional configuration file, which overrides all others."
        ),
    ]
    profile: Annotated[
        str,
        OptionInfo(
            metavar="NAME",
            in_files=False,
            help="Profile to apply, from the profiles section of the configuration files.",
        ),
    ]


class SubmitOptions(
    _Size,
    _Run,
    _Code,
    _Shell,
    _Container,
    _Stage,
    _Launch,
    _Time,
    _Notify,
    _Rest,
    _Sources,
    SbatchOptions,
    total=False,
):
    """All options of a submission except the script and its arguments."""


_GROUPS = (
    _Size,
    _Run,
    _Code,
    _Shell,
    _Container,
    _Stage,
    _Launch,
    _Time,
    _Notify,
    _Rest,
    _Sources,
)


@cache
def sbatch_options() -> dict[str, str]:
    """Return the long name of each option that is passed to sbatch, by its name in Python."""
    return {name: name.replace("_", "-") for name in SbatchOptions.__annotations__}


@cache
def all_options() -> dict[str, Option]:
    """Return all options of hpctrain itself by name, in display order."""
    found = {}
    for group in _GROUPS:
        for name, hint in group.__annotations__.items():
            kind, (about,) = OptionType.from_hint(hint.__origin__), hint.__metadata__
            found[name] = Option(name, str(group.__doc__).rstrip("."), kind, about)
    return found
