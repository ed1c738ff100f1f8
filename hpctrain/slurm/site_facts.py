"""Facts about a Slurm site: configuration, partitions, nodes, and the site's own conventions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hpctrain.slurm.config import SlurmConfig

#: The site's reaction to a job that requests memory.
MemoryOptionSupport = Literal["accepted", "ignored", "refused"]


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Identical nodes of a partition."""

    names: str
    """A hostlist in Slurm's compact notation."""
    num: int
    state: str = "idle"
    cpus: int
    memory_mib: int
    gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs per node by type. GPUs without a type have the key ""."""
    features: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int:
        return sum(self.gpus.values())

    @property
    def is_out(self) -> bool:
        """True if no job can currently start on these nodes."""
        # State suffixes: * is not responding; the others do not block jobs (sinfo(1), NODE STATE CODES).
        return "*" in self.state or self.state.rstrip("~#!%$@^+-").lower() in _OUT


#: Node states in which no job can start.
_OUT = frozenset(
    {"down", "drained", "draining", "drng", "drain", "fail", "failing", "maint", "unknown", "future"}
)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition: limits and nodes. None means no limit."""

    name: str
    default: bool = False
    state: str = "UP"
    hidden: bool = False
    max_time_s: float | None = None
    default_time_s: float | None = None
    """The limit of a job without a time limit; None means `max_time_s`."""
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
    """Seconds between SIGTERM and SIGKILL for a preempted job."""
    qos: str | None = None
    """The QOS whose limits apply to every job of the partition."""
    allow_accounts: tuple[str, ...] | None = None
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] | None = None
    deny_qos: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] | None = None
    root_only: bool = False
    needs_reservation: bool = False
    whole_nodes: bool = False
    """True if each job gets exclusive nodes."""
    groups: tuple[NodeGroup, ...] = ()

    @property
    def time_without_option_s(self) -> float | None:
        """The limit of a job without a time limit; None means no limit."""
        return self.default_time_s if self.default_time_s is not None else self.max_time_s

    @property
    def num_nodes(self) -> int:
        return sum(group.num for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class Qos:
    """A QOS, which changes the limits of partitions."""

    name: str
    preempt_mode: str = ""
    grace_time_s: float = 0.0
    max_time_s: float | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SiteConventions:
    """Site conventions that are not in Slurm's configuration. `hpctrain doctor` probes them."""

    memory_option: MemoryOptionSupport = "accepted"
    needs_time: bool = False
    """True if a job without a time limit is rejected."""
    needs_memory: bool = False
    """True if a job without a memory request is rejected."""
    requeue: bool = True
    """False if the site disables requeues for every job."""
    containers: tuple[str, ...] | None = None
    """Available container runtimes: pyxis, apptainer, singularity, enroot; None if not probed."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A Slurm site. Unknown facts are None or empty, and never fail a check."""

    slurm: SlurmConfig | None = None
    partitions: tuple[Partition, ...] = ()
    habits: SiteConventions = field(default_factory=SiteConventions)

    def partition(self, name: str) -> Partition | None:
        return next((partition for partition in self.partitions if partition.name == name), None)

    @property
    def default_partition(self) -> Partition | None:
        return next((partition for partition in self.partitions if partition.default), None)

    def node_groups(self) -> Iterator[NodeGroup]:
        """Yield the node groups of all partitions. A node in two partitions is yielded twice."""
        for partition in self.partitions:
            yield from partition.groups
