"""Every option of a submission: its name, type and meaning, in one table.

The command line, `SubmitOptions` in Python, the keys of `hpctrain.yaml`, what `hpctrain init` writes and
the tables of the documentation are all made from it. A new option is one more field of a group below.
"""

# Annotations are no texts here: to read those of all options takes longer than the rest of this module.
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Literal, TypedDict

from hpctrain.jobs.container import Container, is_image_file
from hpctrain.jobs.copied_code import DEFAULT_LIMIT_MB
from hpctrain.jobs.launcher import LauncherName, RendezvousBackend, Torchrun
from hpctrain.jobs.notify import DEFAULT_STALL_S, OCCASIONS
from hpctrain.jobs.option import About, Kind, Option
from hpctrain.jobs.shell import is_folder_of_conda
from hpctrain.jobs.spec import DEFAULT_SIGNAL_LEAD_S, ContinueBy, GpuDirective, JobSpec, NodeCheckWhen


def is_template_path(value: str) -> bool:
    """Whether a value of `template` is a path, and not the name of a shipped template."""
    return "/" in value or value.endswith(".j2")


class _Size(TypedDict, total=False):
    """Size of the run."""

    nodes: Annotated[
        int | str,
        About(
            metavar="N|MIN:MAX",
            default=JobSpec.nodes,
            help="Number of nodes; with MIN:MAX as many as there are, and the run goes on if it loses some.",
        ),
    ]
    spares: Annotated[
        int,
        About(
            metavar="N",
            default=JobSpec.spares,
            help="Nodes to have besides, which take the place of a lost one without a wait in the queue.",
        ),
    ]
    node_check: Annotated[
        NodeCheckWhen,
        About(
            default=JobSpec.node_check,
            help="Try nodes out before the ranks start, and leave bad ones out; auto does so after a failure "
            "of a GPU or of the communication, or a hang.",
        ),
    ]
    grow_after: Annotated[
        int,
        About(
            metavar="SECONDS",
            default=JobSpec.grow_after_s,
            help="How long a run on fewer than MAX nodes waits before it looks for more; 0 for never.",
        ),
    ]
    gpus_per_node: Annotated[
        int | str,
        About(
            metavar="[TYPE:]G",
            default=JobSpec.gpus_per_node,
            help="GPUs of each node, one rank each, and their type where it matters: h100:8. 0 runs on CPUs.",
        ),
    ]
    tasks_per_node: Annotated[
        int,
        About(metavar="T", default_words="one a GPU, or 1", help="Ranks on each node of a run on CPUs."),
    ]
    cpus_per_task: Annotated[int, About(metavar="C", example="8", help="CPUs of each rank.")]
    mem: Annotated[
        int | str,
        About(
            metavar="SIZE",
            example="64G",
            directive=True,
            help="Memory of each node, in megabytes or with one of K, M, G, T behind it; 0 for all of it.",
        ),
    ]
    mem_per_cpu: Annotated[
        int | str, About(metavar="SIZE", example="4G", directive=True, help="Memory for each CPU.")
    ]
    mem_per_gpu: Annotated[
        int | str, About(metavar="SIZE", example="80G", directive=True, help="Memory for each GPU.")
    ]
    exclusive: Annotated[
        bool | Literal["user", "mcs"],
        About(
            directive=True,
            help="Share the nodes with no other job; in a file also user or mcs, as in sbatch.",
        ),
    ]
    array: Annotated[
        int | str,
        About(
            metavar="TASKS[%LIMIT]",
            example="0-19%4",
            help="A job array: a run for each number, in a folder of its own, LIMIT of them at once. Its "
            "script finds the number in HPCTRAIN_ARRAY_TASK_ID.",
        ),
    ]


class _Run(TypedDict, total=False):
    """The run itself."""

    name: Annotated[str, About(default_words="the script's", help="Name of the job.")]
    run_dir: Annotated[
        str | os.PathLike[str],
        About(
            metavar="PATH",
            default_words="runs/<run id>",
            help="Folder of the run; that of an ended run continues it.",
            is_path=lambda _: True,
        ),
    ]
    backend: Annotated[
        Literal["auto", "slurm", "local"],
        About(default="auto", help="Where to run; auto takes Slurm where it answers."),
    ]
    template: Annotated[
        str | os.PathLike[str],
        About(
            metavar="NAME|PATH",
            default_words="ddp, or cpu without GPUs; torchrun with its launcher",
            help="Template of the batch script; what has a / or ends in .j2 is a path.",
            is_path=is_template_path,
        ),
    ]
    env: Annotated[
        Mapping[str, str],
        About(
            metavar="NAME=VALUE",
            example="NCCL_DEBUG: INFO",
            help="A variable for the ranks.",
        ),
    ]
    max_failures: Annotated[
        int,
        About(
            metavar="N",
            default=JobSpec.max_failures,
            help="Crashes in a row, with no new checkpoint between them, that end the run.",
        ),
    ]
    restart: Annotated[
        Mapping[str, Mapping[str, str]],
        About(
            metavar="KIND.FIELD=N",
            example="oom: {retries: 0}",
            help="Another number in the table of what follows on which kind of failure.",
        ),
    ]
    warm_workers: Annotated[
        int | Literal["never"],
        About(
            metavar="SECONDS|never",
            default=JobSpec.warm_workers_s,
            help="After so many seconds of training, have workers wait on each node with what takes long "
            "imported: a restart then takes a fraction of the time, and each waiting worker some 250 MB.",
        ),
    ]
    hang_limit: Annotated[
        int | Literal["never"],
        About(
            metavar="SECONDS|never",
            default=JobSpec.hang_limit_s,
            help="A run hangs where no rank gets on for longer than this, and than ten times the longest "
            "step that it has seen; it is then started again.",
        ),
    ]
    continue_by: Annotated[
        ContinueBy,
        About(
            default=JobSpec.continue_by,
            help="How a stopped run goes on: requeue, the same job again, which Slurm holds for two minutes; "
            "successor, another job of the run after it. auto requeues where the site does.",
        ),
    ]


class _Code(TypedDict, total=False):
    """Code."""

    snapshot: Annotated[
        bool,
        About(
            default_words="yes",
            help="Copy what git tracks, local changes and new files into the run folder, and run the copy.",
        ),
    ]
    snapshot_limit: Annotated[
        int, About(metavar="MB", default=DEFAULT_LIMIT_MB, help="How much may be copied, in megabytes.")
    ]


class _Shell(TypedDict, total=False):
    """What the batch script readies."""

    module: Annotated[
        Sequence[str],
        About(metavar="NAME", example="[cuda/12.4, nccl]", help="A module to load."),
    ]
    conda: Annotated[
        str | os.PathLike[str],
        About(
            metavar="NAME|PATH",
            example="torch",
            help="Environment of conda for supervisor and ranks; hpctrain has to be installed in it.",
            is_path=is_folder_of_conda,
        ),
    ]
    venv: Annotated[
        str | os.PathLike[str],
        About(
            metavar="PATH",
            example="~/envs/torch",
            help="Virtual environment for supervisor and ranks; hpctrain has to be installed in it.",
            is_path=lambda _: True,
        ),
    ]
    setup: Annotated[
        Sequence[str],
        About(
            metavar="LINE",
            example="[ulimit -c 0]",
            help="A line of shell, which the batch script runs as it stands.",
        ),
    ]


class _Container(TypedDict, total=False):
    """Container."""

    container_image: Annotated[
        str | os.PathLike[str],
        About(
            metavar="IMAGE",
            example="docker://nvcr.io/nvidia/pytorch:25.03-py3",
            help="Run the ranks in a container: an image file, or where to get the image from.",
            is_path=is_image_file,
        ),
    ]
    container_runtime: Annotated[
        Literal["auto", "pyxis", "apptainer"],
        About(default="auto", help="What starts the container; auto takes what the site has."),
    ]
    container_mounts: Annotated[
        Sequence[str],
        About(
            metavar="SRC:DST[:ro],…",
            example="[/scratch:/scratch, ~/data:/data:ro]",
            help="What else of the host is seen inside.",
            is_path=lambda _: True,
        ),
    ]
    container_env: Annotated[
        Sequence[str],
        About(
            metavar="NAME,…",
            example="[HF_HOME]",
            help="Variables of the job that win over the image's, as those of --env do anyway.",
        ),
    ]
    container_python: Annotated[
        str,
        About(
            metavar="PATH", default=Container.python, help="The interpreter in the container, 3.11 or newer."
        ),
    ]


class _Launch(TypedDict, total=False):
    """Start of the ranks."""

    launcher: Annotated[
        LauncherName,
        About(
            default_words="torchrun with its template, or srun",
            help="Who starts the ranks: srun, one task each, or an agent of torchrun on each node.",
        ),
    ]
    rdzv_backend: Annotated[
        RendezvousBackend,
        About(default_words=Torchrun.rdzv_backend, help="How the agents of torchrun find each other."),
    ]
    rdzv_endpoint: Annotated[
        str,
        About(metavar="HOST:PORT", example="etcd.site:2379", help="The etcd server at which they meet."),
    ]


class _Time(TypedDict, total=False):
    """Time."""

    time: Annotated[
        int | str,
        About(
            metavar="TIME",
            example="12:00:00",
            default_words="the partition's",
            help="Time limit of the job: minutes, HH:MM:SS, D-HH:MM:SS, or unlimited.",
        ),
    ]
    signal_lead: Annotated[
        int,
        About(
            metavar="SECONDS",
            default_words=f"{DEFAULT_SIGNAL_LEAD_S}, or a third of the limit",
            help="How long before the time limit the ranks are told to save.",
        ),
    ]
    begin: Annotated[
        str,
        About(metavar="TIME", example="now+1hour", directive=True, help="Do not start the job earlier."),
    ]


class _Queue(TypedDict, total=False):
    """Place in the queue."""

    partition: Annotated[str, About(example="gpu", directive=True, help="Partitions to choose from.")]
    account: Annotated[str, About(example="physics", directive=True, help="Account that is charged.")]
    qos: Annotated[str, About(example="long", directive=True, help="Quality of service.")]
    reservation: Annotated[
        str, About(example="workshop", directive=True, help="Reservation whose nodes to take.")
    ]
    dependency: Annotated[
        str,
        About(
            metavar="KIND:RUN|JOB",
            example="afterok:digits-20261121-052813-cc6c",
            directive=True,
            help="What has to happen first, in sbatch's notation; a run's id or folder may stand for a job.",
        ),
    ]
    nice: Annotated[
        int,
        About(metavar="N", example="100", directive=True, help="Take N off the priority of the job."),
    ]
    licenses: Annotated[
        str,
        About(metavar="NAME[:N],…", example="fluent:2", directive=True, help="Licences that the job takes."),
    ]


class _Nodes(TypedDict, total=False):
    """Choice of nodes."""

    constraint: Annotated[
        str, About(example="ib&ssd", directive=True, help="Features that the nodes must have.")
    ]
    nodelist: Annotated[
        str,
        About(
            metavar="NODES", example="n[01-04]", directive=True, help="Nodes that have to be among the job's."
        ),
    ]
    exclude: Annotated[
        str, About(metavar="NODES", example="n[07,12]", directive=True, help="Nodes not to take.")
    ]
    switches: Annotated[
        int | str,
        About(
            metavar="N[@TIME]",
            example="1@02:00:00",
            directive=True,
            help="Leaf switches that may connect the nodes at most, and how long to wait for that.",
        ),
    ]
    gres: Annotated[
        str,
        About(
            metavar="NAME[:N],…",
            example="nvme:1",
            directive=True,
            help="Other generic resources of each node than GPUs.",
        ),
    ]
    gpu_directive: Annotated[
        GpuDirective,
        About(
            default=JobSpec.gpu_directive,
            help="The option of sbatch by which this site is asked for GPUs.",
        ),
    ]


class _Words(TypedDict, total=False):
    """Words about the job."""

    mail_type: Annotated[
        str,
        About(metavar="EVENT,…", example="END,FAIL", directive=True, help="What to send mails about."),
    ]
    mail_user: Annotated[
        str, About(metavar="ADDRESS", example="me@example.org", directive=True, help="Who gets the mails.")
    ]
    comment: Annotated[str, About(example="ablation 3", directive=True, help="A comment on the job.")]


class _Notify(TypedDict, total=False):
    """Word to somebody."""

    notify: Annotated[
        Sequence[str],
        About(
            metavar="URL|COMMAND",
            example="[https://hooks.example.org/T123, mail -s hpctrain me@example.org]",
            help="Whom the run tells when it ends, fails or stalls: an address to POST to, or a shell line.",
        ),
    ]
    notify_on: Annotated[
        Sequence[str],
        About(
            metavar="OCCASION",
            example="[failure, stall]",
            default_words=", ".join(OCCASIONS),
            help="Of what: finish, failure or stall.",
        ),
    ]
    notify_stall_after: Annotated[
        int,
        About(metavar="SECONDS", default=DEFAULT_STALL_S, help="How long without a logged step is a stall."),
    ]


class _Rest(TypedDict, total=False):
    """All the rest."""

    sbatch: Annotated[
        Mapping[str, str],
        About(
            metavar="KEY[=VALUE]",
            example="hint: nomultithread",
            help="An option of sbatch that has none here, by its long name.",
        ),
    ]


class _Sources(TypedDict, total=False):
    """Where options come from."""

    config: Annotated[
        str | os.PathLike[str],
        About(metavar="FILE", in_files=False, help="A file of options, which wins over all others."),
    ]
    profile: Annotated[
        str,
        About(metavar="NAME", in_files=False, help="The section of this name under profiles: in the files."),
    ]


class SubmitOptions(
    _Size,
    _Run,
    _Code,
    _Shell,
    _Container,
    _Launch,
    _Time,
    _Queue,
    _Nodes,
    _Words,
    _Notify,
    _Rest,
    _Sources,
    total=False,
):
    """Everything that can be asked of a submission besides the script and its arguments."""


_GROUPS = (
    _Size,
    _Run,
    _Code,
    _Shell,
    _Container,
    _Launch,
    _Time,
    _Queue,
    _Nodes,
    _Words,
    _Notify,
    _Rest,
    _Sources,
)


@cache
def options() -> dict[str, Option]:
    """All options by name, in the order in which they are shown."""
    found = {}
    for group in _GROUPS:
        for name, hint in group.__annotations__.items():
            kind, (about,) = Kind.of(hint.__origin__), hint.__metadata__
            found[name] = Option(name, str(group.__doc__).rstrip("."), kind, about)
    return found
