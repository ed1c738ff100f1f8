"""Discovery of a site from the output of Slurm's commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hpctrain.errors import SchedulerError
from hpctrain.slurm import parsing
from hpctrain.slurm.command import run_all
from hpctrain.slurm.config import parse_config
from hpctrain.slurm.site_facts import NodeGroup, Partition, Qos, Site
from hpctrain.slurm.site_queries import SiteAnswers, query_site

#: Runs a Slurm command and returns its output, or raises SchedulerError.
RunQuery = Callable[[Sequence[str]], str]

_QOS_FIELDS = "Name,PreemptMode,GraceTime,MaxWall,Flags"
_QOS = ("sacctmgr", "--noheader", "--parsable2", "--readonly", "show", "qos", f"format={_QOS_FIELDS}")


def discover_site(environ: Mapping[str, str], profile: Site) -> tuple[Site, list[str]]:
    """Query Slurm for the site. See `parse_site`."""
    return parse_site(run_all(query_site(environ)), profile)


def parse_site(answers: SiteAnswers, profile: Site) -> tuple[Site, list[str]]:
    """Return the site according to Slurm, completed by the profile; with a note on each failed query."""
    nodes, config, partitions = (answer if isinstance(answer, str) else "" for answer in answers)
    gaps = [
        f"Cannot query {what} ({answer})"
        for what, answer in zip(
            ("the nodes", "Slurm's configuration", "the partitions"), answers, strict=True
        )
        if isinstance(answer, SchedulerError)
    ]
    site = profile
    if config:
        site = replace(site, slurm=parse_config(config))
    if partitions:
        site = replace(site, partitions=tuple(map(parse_partition, partitions.splitlines())))
    # A site may hide its nodes (PrivateData) and list them in the profile instead.
    groups = {one.name: one.groups for one in profile.partitions} | _parse_nodes(nodes)
    completed = tuple(replace(one, groups=groups.get(one.name, ())) for one in site.partitions)
    return replace(site, partitions=completed), gaps


def query_qos(ask: RunQuery) -> list[Qos]:
    """Return every QOS of the site.

    Raises:
        SchedulerError: there is no accounting, or it does not answer.
    """
    found = []
    for line in ask(_QOS).splitlines():
        cells = line.split("|")
        if len(cells) == 5:
            name, mode, grace, wall, flags = cells
            found.append(
                Qos(
                    name=name,
                    preempt_mode=mode.upper(),
                    grace_time_s=parsing.parse_time_limit(grace) or 0.0,
                    max_time_s=parsing.parse_time_limit(wall),
                    flags=parsing.parse_names(flags),
                )
            )
    return found


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
    found: dict[str, tuple[NodeGroup, ...]] = {}
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
        found[partition] = (*found.get(partition, ()), group)
    return found
