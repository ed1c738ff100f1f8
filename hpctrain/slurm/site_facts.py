"""Read the facts about a Slurm site once per submission: configuration, partitions, nodes, conventions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from hpctrain.errors import SchedulerError
from hpctrain.slurm import parsing
from hpctrain.slurm.command import run_slurm
from hpctrain.slurm.config import SiteAnswers, SlurmConfig, parse_config
from hpctrain.slurm.parsing import format_time_limit, parse_duration
from hpctrain.text import pluralize

#: Runs a Slurm command and returns its output, or raises SchedulerError.
RunQuery = Callable[[Sequence[str]], str]


class NodeGroup(Struct, frozen=True, kw_only=True):
    """Identical nodes of a partition."""

    num: int
    state: str = "idle"
    cpus: int
    memory_mib: int
    gpus: Mapping[str, int] = {}
    """GPUs per node by type. GPUs without a type have the key ""."""
    features: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int:
        return sum(self.gpus.values())

    @property
    def is_usable(self) -> bool:
        """True if the nodes run jobs or wait for jobs, and are not, for example, reserved or powered down."""
        return self.state in ("idle", "mixed", "allocated", "completing", "planned")


class Partition(Struct, frozen=True, kw_only=True):
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
    allow_accounts: tuple[str, ...] | None = None
    allow_qos: tuple[str, ...] | None = None
    allow_groups: tuple[str, ...] | None = None
    needs_reservation: bool = False
    whole_nodes: bool = False
    """True if each job gets exclusive nodes."""
    groups: tuple[NodeGroup, ...] = ()

    @property
    def time_without_option_s(self) -> float | None:
        """The limit of a job without a time limit; None means no limit."""
        return self.default_time_s if self.default_time_s is not None else self.max_time_s

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
            "default time {}": format_time_limit(self.default_time_s) if self.default_time_s else None,
            "at most {}": None if self.max_nodes is None else pluralize(self.max_nodes, "node"),
            "at least {}": pluralize(self.min_nodes, "node") if self.min_nodes > 1 else None,
            "at most {} MiB per node": self.max_mem_per_node_mib,
            "at most {} CPUs per node": self.max_cpus_per_node,
            "for accounts {}": self.allow_accounts and ", ".join(self.allow_accounts),
            "for QOS {}": self.allow_qos and ", ".join(self.allow_qos),
            "for groups {}": self.allow_groups and ", ".join(self.allow_groups),
            "requires a reservation": self.needs_reservation or None,
        }
        described = [text.format(value) for text, value in limits.items() if value is not None]
        is_limited = self.max_time_s is not None
        time = f"time limit {format_time_limit(self.max_time_s)}" if is_limited else "no time limit"
        return ", ".join([time, *described])


class SiteConventions(Struct, frozen=True, kw_only=True):
    """Site conventions that are not in Slurm's configuration. `hpctrain doctor` probes them."""

    memory_option: Literal["accepted", "ignored", "refused"] = "accepted"
    """The site's reaction to a job that requests memory."""
    needs_time: bool = False
    """True if a job without a time limit is rejected."""
    needs_memory: bool = False
    """True if a job without a memory request is rejected."""
    requeue: bool = True
    """False if the site disables requeues for every job."""
    containers: tuple[str, ...] | None = None
    """Available container runtimes: pyxis, apptainer, singularity, enroot; None if not probed."""


class Site(Struct, frozen=True, kw_only=True):
    """A Slurm site. Unknown facts are None or empty, and never fail a check."""

    slurm: SlurmConfig | None = None
    partitions: tuple[Partition, ...] = ()
    habits: SiteConventions = SiteConventions()

    def partition(self, name: str) -> Partition | None:
        return next((partition for partition in self.partitions if partition.name == name), None)

    @property
    def default_partition(self) -> Partition | None:
        return next((partition for partition in self.partitions if partition.default), None)

    @property
    def expedites_requeues(self) -> bool:
        """True if the site requeues jobs, and can start a requeued job without a delay."""
        return self.slurm is not None and self.habits.requeue and self.slurm.expedites_requeues

    def is_preemptible(self, partition: Partition) -> bool:
        """True if jobs of another partition can preempt jobs of the partition. QOS are not considered."""
        # PreemptMode of partitions only applies if jobs are preempted by partition tier (slurm.conf(5)).
        by_tier = self.slurm is not None and self.slurm.preempt_type == "partition_prio"
        if not by_tier or partition.preempt_mode == "OFF":
            return False
        return any(competitor.priority_tier > partition.priority_tier for competitor in self.partitions)


#: Time limit for slurmdbd, which some sites make unreachable from compute nodes.
_ACCOUNTING_LIMIT_S = 10.0


def query_grace_s(partition: str, qos: str, config: SlurmConfig, environ: Mapping[str, str]) -> float | None:
    """Return the GraceTime of the partition or QOS, else KillWait, in seconds; None if unknown."""
    if config.preempt_type == "qos":
        # Only accounting can report it.
        command = ["sacctmgr", "--noheader", "--parsable2", "show", "qos", qos, "format=GraceTime"]
        answer = run_slurm(command, environ, timeout_s=_ACCOUNTING_LIMIT_S).strip() if qos else ""
        if not answer:
            return None
        return parse_duration(answer) if answer.strip("0:") else config.kill_wait_s
    answer = run_slurm(["scontrol", "--oneliner", "show", "partition", partition], environ)
    return parse_partition(answer).grace_time_s or config.kill_wait_s


def has_pyxis(environ: Mapping[str, str]) -> bool:
    """Return true if srun on this machine can start containers."""
    try:
        return "--container-image" in run_slurm(["srun", "--help"], environ, timeout_s=10.0)
    except SchedulerError:
        return False


def nodes_are_this_machine(ask: RunQuery) -> bool:
    """Return true if all nodes of the cluster run on this machine."""
    try:
        hosts = set(ask(["sinfo", "--all", "--noheader", "--format=%n"]).split())
    except SchedulerError:
        return False
    return hosts == {os.uname().nodename.partition(".")[0]}


def parse_site(answers: SiteAnswers, habits: SiteConventions) -> tuple[Site, list[str]]:
    """Return the site according to Slurm, with a note on each failed query."""
    nodes, config, partitions = (reply if isinstance(reply, str) else "" for reply in answers)
    subjects = ("the nodes", "Slurm's configuration", "the partitions")
    gaps = [
        f"Cannot query {subject} ({reply})"
        for subject, reply in zip(subjects, answers, strict=True)
        if isinstance(reply, SchedulerError)
    ]
    groups = _parse_nodes(nodes)
    site = Site(
        slurm=parse_config(config) if config else None,
        partitions=tuple(
            replace(partition, groups=groups.get(partition.name, ()))
            for partition in map(parse_partition, partitions.splitlines())
        ),
        habits=habits,
    )
    return site, gaps


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
        allow_accounts=parsing.parse_names_or_all(value("AllowAccounts")),
        allow_qos=parsing.parse_names_or_all(value("AllowQos")),
        allow_groups=parsing.parse_names_or_all(value("AllowGroups")),
        needs_reservation=is_yes("ReqResv"),
        whole_nodes=value("OverSubscribe").upper() == "EXCLUSIVE",
    )


def _parse_nodes(output: str) -> dict[str, tuple[NodeGroup, ...]]:
    groups: dict[str, tuple[NodeGroup, ...]] = {}
    for line in output.splitlines():
        cells = line.split("|", 6)
        if len(cells) < 7:
            continue
        partition, num, cpus, memory, state, gres, features = cells
        group = NodeGroup(
            num=parsing.parse_number(num) or 0,
            state=state,
            cpus=parsing.parse_number(cpus) or 0,
            memory_mib=parsing.parse_number(memory) or 0,
            gpus=parsing.parse_gpus(gres),
            features=parsing.parse_names(features),
        )
        groups[partition] = (*groups.get(partition, ()), group)
    return groups
