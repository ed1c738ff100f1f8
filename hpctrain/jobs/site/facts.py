"""A Slurm site as values: its configuration, its partitions, their nodes, and what it wants of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

#: What becomes of a job that gives its memory: it is heard, heard in vain, or refused.
MemoryOption = Literal["accepted", "ignored", "refused"]


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What `scontrol show config` says of importance to a training run."""

    cluster: str = ""
    version: str = ""
    accounting: bool = False
    """Whether slurmdbd keeps records, so that `sacct` works."""
    enforced: tuple[str, ...] = ()
    """AccountingStorageEnforce: associations, limits, qos, …"""
    job_requeue: bool = True
    """Whether jobs that do not say so are put back into the queue, too."""
    preempt_type: str = "none"
    """By what jobs are preempted: none, partition_prio or qos."""
    preempt_mode: str = "OFF"
    signals_user: bool = False
    """Whether a preemption sends the signal that the job asked for (preempt_send_user_signal)."""
    kill_wait_s: float = 30.0
    """Seconds from SIGTERM to SIGKILL at a job's end."""
    slurmd_timeout_s: float = 300.0
    """Seconds after which a silent node is given up."""
    max_array_size: int = 1001
    """The highest number of a job array's task is one less."""
    max_mem_per_node_mib: int | None = None
    max_mem_per_cpu_mib: int | None = None
    def_mem_per_node_mib: int | None = None
    def_mem_per_cpu_mib: int | None = None
    select: str = ""
    """The plugin that hands out nodes: linear gives whole ones."""
    hands_out_memory: bool = False
    """Whether memory is shared out like CPUs (SelectTypeParameters)."""
    enforces_limits: Literal["NO", "ANY", "ALL"] = "NO"
    """EnforcePartLimits: in how many of its partitions a job has to fit to be queued. With NO it may wait for
    ever, unless a QOS lifts the limit; with the others none can."""
    chooses_partition: bool = False
    """Whether a plugin of the site reads jobs over, and may choose their partition."""
    requeue_exit: str = ""
    """Exit codes after which Slurm itself puts a job back into the queue."""

    @property
    def default_memory_mib(self) -> int | None:
        """What a job that gives no memory gets, of each node or CPU; None for all of its nodes'."""
        return self.def_mem_per_node_mib or self.def_mem_per_cpu_mib


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of a partition that are alike."""

    names: str
    """In Slurm's compact form."""
    num: int
    state: str = "idle"
    cpus: int
    memory_mib: int
    gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs of each node by their type; the type is empty where the site gives none."""
    features: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int:
        return sum(self.gpus.values())

    @property
    def is_out(self) -> bool:
        """Whether no job starts there for now."""
        # Marks behind a state: * is silent, the others do not keep jobs out (sinfo(1), NODE STATE CODES).
        return "*" in self.state or self.state.rstrip("~#!%$@^+-").lower() in _OUT


#: States of nodes that take no job.
_OUT = frozenset(
    {"down", "drained", "draining", "drng", "drain", "fail", "failing", "maint", "unknown", "future"}
)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One partition: its limits, and its nodes. None stands for no limit."""

    name: str
    default: bool = False
    state: str = "UP"
    hidden: bool = False
    max_time_s: float | None = None
    default_time_s: float | None = None
    """The limit of a job that gives none; None for `max_time_s`."""
    min_nodes: int = 0
    max_nodes: int | None = None
    max_cpus_per_node: int | None = None
    max_mem_per_node_mib: int | None = None
    max_mem_per_cpu_mib: int | None = None
    def_mem_per_node_mib: int | None = None
    def_mem_per_cpu_mib: int | None = None
    priority_tier: int = 1
    preempt_mode: str = "OFF"
    grace_time_s: float = 0.0
    """Seconds that a preempted job has before the kill, beginning with SIGTERM."""
    qos: str | None = None
    """The QOS whose limits hold for every job of the partition."""
    allow_accounts: tuple[str, ...] | None = None
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] | None = None
    deny_qos: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] | None = None
    root_only: bool = False
    needs_reservation: bool = False
    whole_nodes: bool = False
    """Whether each job gets its nodes to itself."""
    groups: tuple[NodeGroup, ...] = ()

    @property
    def time_without_option_s(self) -> float | None:
        """The time limit of a job that gives none; None for no limit."""
        return self.default_time_s if self.default_time_s is not None else self.max_time_s

    @property
    def num_nodes(self) -> int:
        return sum(group.num for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class Qos:
    """What a QOS adds to, or takes from, the limits of partitions."""

    name: str
    preempt_mode: str = ""
    grace_time_s: float = 0.0
    max_time_s: float | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What the site wants of a job, which Slurm's configuration does not show: `hpctrain doctor` tries it."""

    memory_option: MemoryOption = "accepted"
    needs_time: bool = False
    """Whether a job that gives no time limit is refused."""
    needs_memory: bool = False
    """Whether a job that gives no memory is refused."""
    requeue: bool = True
    """False where the site takes the right to be requeued from every job."""
    containers: tuple[str, ...] | None = None
    """Ways to run a container: pyxis, apptainer, singularity, enroot; None where nobody has looked."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A Slurm site. What could not be found out is None or empty, and nothing is held against it."""

    slurm: SlurmConfig | None = None
    partitions: tuple[Partition, ...] = ()
    habits: Habits = field(default_factory=Habits)

    def partition(self, name: str) -> Partition | None:
        return next((partition for partition in self.partitions if partition.name == name), None)

    @property
    def default_partition(self) -> Partition | None:
        return next((partition for partition in self.partitions if partition.default), None)

    def node_groups(self) -> Iterator[NodeGroup]:
        """The node groups of all partitions; a node that is in two comes twice."""
        for partition in self.partitions:
            yield from partition.groups
