"""Facts about a Slurm site: configuration, partitions, nodes, and the site's own conventions.

Read once per submission, from three concurrent Slurm commands and the site profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hpctrain.errors import SchedulerError
from hpctrain.slurm import parsing
from hpctrain.slurm.command import SlurmCall, run_all
from hpctrain.slurm.config import CONFIG_COMMAND, SlurmConfig, parse_config
from hpctrain.slurm.duration import format_time_limit
from hpctrain.text import pluralize

#: Output of each command, or the error if it failed.
SiteAnswers = Sequence[str | SchedulerError]
#: Runs a Slurm command and returns its output, or raises SchedulerError.
RunQuery = Callable[[Sequence[str]], str]

# Includes hidden partitions, which users can name. Nodes of a partition with identical values share a line.
# The free-text columns come last.
_NODES = ("sinfo", "--all", "--noheader", "--exact", "--format=%R|%D|%c|%m|%T|%N|%G|%f")
_PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
_QOS_FIELDS = "Name,PreemptMode,GraceTime,MaxWall,Flags"
_QOS = ("sacctmgr", "--noheader", "--parsable2", "--readonly", "show", "qos", f"format={_QOS_FIELDS}")

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
    def is_usable(self) -> bool:
        """True if the nodes run jobs or wait for jobs, and are not, for example, reserved or powered down."""
        return self.state in ("idle", "mixed", "allocated", "completing", "planned")

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

    def describe_nodes(self) -> str:
        """Describe the nodes, such as `4 nodes with 64 CPUs, 512000 MiB, 4 a100 GPUs`."""
        counts: dict[str, int] = {}
        for group in self.groups:
            gpus = (f", {num} {f'{kind} ' if kind else ''}GPUs" for kind, num in group.gpus.items())
            kind = f"{pluralize(group.cpus, 'CPU')}, {group.memory_mib} MiB{''.join(gpus)}"
            counts[kind] = counts.get(kind, 0) + group.num
        nodes = (f"{pluralize(num, 'node')} with {kind}" for kind, num in counts.items())
        return " + ".join(nodes) or "no nodes"

    def describe_limits(self) -> str:
        """Describe the limits, such as `time limit 02:00:00, at most 2 nodes`."""
        limits = {
            "time limit {}": format_time_limit(self.max_time_s) if self.max_time_s is not None else None,
            "default time {}": format_time_limit(self.default_time_s) if self.default_time_s else None,
            "at most {}": None if self.max_nodes is None else pluralize(self.max_nodes, "node"),
            "at least {}": pluralize(self.min_nodes, "node") if self.min_nodes > 1 else None,
            "at most {} MiB per node": self.max_mem_per_node_mib,
            "at most {} MiB per CPU": self.max_mem_per_cpu_mib,
            "default memory {} MiB per CPU": self.def_mem_per_cpu_mib,
            "default memory {} MiB per node": self.def_mem_per_node_mib,
            "at most {} CPUs per node": self.max_cpus_per_node,
            "allocates whole nodes": self.whole_nodes or None,
            "QOS {}": self.qos,
            "for accounts {}": self.allow_accounts and ", ".join(self.allow_accounts),
            "for QOS {}": self.allow_qos and ", ".join(self.allow_qos),
            "for groups {}": self.allow_groups and ", ".join(self.allow_groups),
            "for root only": self.root_only or None,
            "requires a reservation": self.needs_reservation or None,
        }
        described = [text.format(value) for text, value in limits.items() if value is not None]
        return ", ".join([*([] if self.max_time_s is not None else ["no time limit"]), *described])


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


def query_site(environ: Mapping[str, str]) -> list[SlurmCall]:
    """Start the queries for nodes, configuration and partitions, which run concurrently."""
    return [SlurmCall(command, environ) for command in (_NODES, CONFIG_COMMAND, _PARTITIONS)]


def discover_site(environ: Mapping[str, str], profile: Site) -> tuple[Site, list[str]]:
    """Query Slurm for the site. See `parse_site`."""
    return parse_site(run_all(query_site(environ)), profile)


def parse_site(answers: SiteAnswers, profile: Site) -> tuple[Site, list[str]]:
    """Return the site according to Slurm, completed by the profile; with a note on each failed query."""
    nodes, config, partitions = (answer if isinstance(answer, str) else "" for answer in answers)
    subjects = ("the nodes", "Slurm's configuration", "the partitions")
    gaps = [
        f"Cannot query {subject} ({answer})"
        for subject, answer in zip(subjects, answers, strict=True)
        if isinstance(answer, SchedulerError)
    ]
    site = profile
    if config:
        site = replace(site, slurm=parse_config(config))
    if partitions:
        site = replace(site, partitions=tuple(map(parse_partition, partitions.splitlines())))
    # A site may hide its nodes (PrivateData) and list them in the profile instead.
    groups = {partition.name: partition.groups for partition in profile.partitions} | _parse_nodes(nodes)
    completed = (replace(partition, groups=groups.get(partition.name, ())) for partition in site.partitions)
    return replace(site, partitions=tuple(completed)), gaps


def query_qos(ask: RunQuery) -> list[Qos]:
    """Return every QOS of the site.

    Raises:
        SchedulerError: there is no accounting, or it does not answer.
    """
    rows = (line.split("|") for line in ask(_QOS).splitlines())
    return [
        Qos(
            name=row[0],
            preempt_mode=row[1].upper(),
            grace_time_s=parsing.parse_time_limit(row[2]) or 0.0,
            max_time_s=parsing.parse_time_limit(row[3]),
            flags=parsing.parse_names(row[4]),
        )
        for row in rows
        if len(row) == 5
    ]


def parse_partition(line: str) -> Partition:
    """Parse a line of `scontrol --oneliner show partition`."""
    values = parsing.parse_pairs(line)

    def value(key: str) -> str:
        return values.get(key, "")

    def is_yes(key: str) -> bool:
        return value(key).upper() == "YES"

    return Partition(
        name=value("PartitionName"),
        default=is_yes("Default"),
        state=value("State").upper() or "UP",
        hidden=is_yes("Hidden"),
        max_time_s=parsing.parse_time_limit(value("MaxTime")),
        default_time_s=parsing.parse_time_limit(value("DefaultTime")),
        min_nodes=parsing.parse_number(value("MinNodes")) or 0,
        max_nodes=parsing.parse_number(value("MaxNodes")),
        max_cpus_per_node=parsing.parse_number(value("MaxCPUsPerNode")),
        max_mem_per_node_mib=parsing.parse_number(value("MaxMemPerNode")),
        max_mem_per_cpu_mib=parsing.parse_number(value("MaxMemPerCPU")),
        def_mem_per_node_mib=parsing.parse_number(value("DefMemPerNode")),
        def_mem_per_cpu_mib=parsing.parse_number(value("DefMemPerCPU")),
        priority_tier=parsing.parse_number(value("PriorityTier")) or 1,
        preempt_mode=value("PreemptMode").upper() or "OFF",
        grace_time_s=float(parsing.parse_number(value("GraceTime")) or 0),
        qos=None if parsing.is_null(value("QoS")) else value("QoS"),
        allow_accounts=parsing.parse_names_or_all(value("AllowAccounts")),
        deny_accounts=parsing.parse_names(value("DenyAccounts")),
        allow_qos=parsing.parse_names_or_all(value("AllowQos")),
        deny_qos=parsing.parse_names(value("DenyQos")),
        allow_groups=parsing.parse_names_or_all(value("AllowGroups")),
        root_only=is_yes("RootOnly"),
        needs_reservation=is_yes("ReqResv"),
        whole_nodes=value("OverSubscribe").upper() == "EXCLUSIVE",
    )


def _parse_nodes(answer: str) -> dict[str, tuple[NodeGroup, ...]]:
    groups: dict[str, tuple[NodeGroup, ...]] = {}
    for line in answer.splitlines():
        cells = line.split("|", 7)
        if len(cells) < 8:
            continue
        partition, num, cpus, memory, state, names, gres, features = cells
        group = NodeGroup(
            names=names,
            num=parsing.parse_number(num) or 0,
            state=state,
            cpus=parsing.parse_number(cpus) or 0,
            memory_mib=parsing.parse_number(memory) or 0,
            gpus=parsing.parse_gpus(gres),
            features=parsing.parse_names(features),
        )
        groups[partition] = (*groups.get(partition, ()), group)
    return groups
