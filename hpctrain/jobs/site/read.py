"""Reading a site from Slurm's own commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from hpctrain.errors import SchedulerError
from hpctrain.jobs.site import words
from hpctrain.jobs.site.facts import NodeGroup, Partition, Qos, Site, SlurmConfig
from hpctrain.jobs.site.questions import Answers, ask_site
from hpctrain.jobs.slurm_command import answers_to

#: Runs one of Slurm's commands and returns its output, or raises SchedulerError.
Ask = Callable[[Sequence[str]], str]

_QOS_FIELDS = "Name,PreemptMode,GraceTime,MaxWall,Flags"
_QOS = ("sacctmgr", "--noheader", "--parsable2", "--readonly", "show", "qos", f"format={_QOS_FIELDS}")

# YES is what ANY was called before 16.05.
_ENFORCING: Mapping[str, Literal["ANY", "ALL"]] = {"ANY": "ANY", "ALL": "ALL", "YES": "ANY"}


def read_site(environ: Mapping[str, str], profile: Site) -> tuple[Site, list[str]]:
    """Ask Slurm, and see what it says. See `site_of`."""
    return site_of(answers_to(ask_site(environ)), profile)


def site_of(answers: Answers, profile: Site) -> tuple[Site, list[str]]:
    """What Slurm says, and where it does not answer, what the profile has; with a note on each such gap."""
    nodes, config, partitions = (answer if isinstance(answer, str) else "" for answer in answers)
    gaps = [
        f"{what} cannot be read ({answer})"
        for what, answer in zip(
            ("The nodes", "Slurm's configuration", "The partitions"), answers, strict=True
        )
        if isinstance(answer, SchedulerError)
    ]
    site = profile
    if config:
        site = replace(site, slurm=parse_config(config))
    if partitions:
        site = replace(site, partitions=tuple(map(_parse_partition, partitions.splitlines())))
    # A site may keep its nodes to itself (PrivateData), and tell of them in the profile.
    groups = {one.name: one.groups for one in profile.partitions} | _parse_nodes(nodes)
    completed = tuple(replace(one, groups=groups.get(one.name, ())) for one in site.partitions)
    return replace(site, partitions=completed), gaps


def parse_config(answer: str) -> SlurmConfig:
    """`scontrol show config` as a value."""
    values = words.config_values(answer)

    def value(key: str, default: str = "") -> str:
        return values.get(key, default)

    def duration_s(key: str, default: float) -> float:
        found = words.number(value(key))
        return default if found is None else float(found)

    plugins = [value("JobSubmitPlugins"), value("CliFilterPlugins")]
    return SlurmConfig(
        cluster=value("ClusterName"),
        version=value("SLURM_VERSION"),
        accounting=value("AccountingStorageType").endswith("slurmdbd"),
        enforced=words.names(value("AccountingStorageEnforce")),
        job_requeue=value("JobRequeue", "1") != "0",
        preempt_type=value("PreemptType", "none").rpartition("/")[2],
        preempt_mode=value("PreemptMode", "OFF"),
        signals_user="preempt_send_user_signal" in value("SlurmctldParameters"),
        kill_wait_s=duration_s("KillWait", SlurmConfig.kill_wait_s),
        slurmd_timeout_s=duration_s("SlurmdTimeout", SlurmConfig.slurmd_timeout_s),
        max_array_size=words.number(value("MaxArraySize")) or SlurmConfig.max_array_size,
        max_mem_per_node_mib=words.number(value("MaxMemPerNode")),
        max_mem_per_cpu_mib=words.number(value("MaxMemPerCPU")),
        def_mem_per_node_mib=words.number(value("DefMemPerNode")),
        def_mem_per_cpu_mib=words.number(value("DefMemPerCPU")),
        select=value("SelectType").rpartition("/")[2],
        hands_out_memory="MEMORY" in value("SelectTypeParameters").upper(),
        enforces_limits=_ENFORCING.get(value("EnforcePartLimits").upper(), "NO"),
        chooses_partition=not all(map(words.is_nothing, plugins)),
        requeue_exit="" if words.is_nothing(value("RequeueExit")) else value("RequeueExit"),
    )


def read_qos(ask: Ask) -> list[Qos]:
    """Every QOS of the site.

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
                    grace_time_s=words.seconds(grace) or 0.0,
                    max_time_s=words.seconds(wall),
                    flags=words.names(flags),
                )
            )
    return found


def _parse_partition(line: str) -> Partition:
    values = words.pairs(line)

    def value(key: str) -> str:
        return values.get(key, "")

    def is_yes(key: str) -> bool:
        return value(key).upper() == "YES"

    return Partition(
        name=value("PartitionName"),
        default=is_yes("Default"),
        state=value("State").upper() or "UP",
        hidden=is_yes("Hidden"),
        max_time_s=words.seconds(value("MaxTime")),
        default_time_s=words.seconds(value("DefaultTime")),
        min_nodes=words.number(value("MinNodes")) or 0,
        max_nodes=words.number(value("MaxNodes")),
        max_cpus_per_node=words.number(value("MaxCPUsPerNode")),
        max_mem_per_node_mib=words.number(value("MaxMemPerNode")),
        max_mem_per_cpu_mib=words.number(value("MaxMemPerCPU")),
        def_mem_per_node_mib=words.number(value("DefMemPerNode")),
        def_mem_per_cpu_mib=words.number(value("DefMemPerCPU")),
        priority_tier=words.number(value("PriorityTier")) or 1,
        preempt_mode=value("PreemptMode").upper() or "OFF",
        grace_time_s=float(words.number(value("GraceTime")) or 0),
        qos=None if words.is_nothing(value("QoS")) else value("QoS"),
        allow_accounts=words.names_or_all(value("AllowAccounts")),
        deny_accounts=words.names(value("DenyAccounts")),
        allow_qos=words.names_or_all(value("AllowQos")),
        deny_qos=words.names(value("DenyQos")),
        allow_groups=words.names_or_all(value("AllowGroups")),
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
            num=words.number(num) or 0,
            state=state,
            cpus=words.number(cpus) or 0,
            memory_mib=words.number(memory) or 0,
            gpus=words.gpus(gres),
            features=words.names(features),
        )
        found[partition] = (*found.get(partition, ()), group)
    return found
