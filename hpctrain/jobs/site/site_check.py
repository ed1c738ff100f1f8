"""Check a job against the facts about its site, before it waits in the queue.

`sbatch --test-only` judges the request. These checks find what it accepts nevertheless: unless
EnforcePartLimits is set, a job that exceeds the limits of its partition is queued, and pends forever (seen
with Slurm 22.05).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.site.job_request import JobRequest
from hpctrain.slurm.config import SlurmConfig
from hpctrain.slurm.duration import format_time_limit
from hpctrain.slurm.site_facts import NodeGroup, Partition, Qos, RunQuery, Site, query_qos
from hpctrain.text import join_or, pluralize

_RESUBMIT_HINT = "Submit the run again with the same --run-dir to continue."
_SUCCESSOR_NOTE = "continues in a successor job, which starts after the previous job has ended"


class ExceededLimit(NamedTuple):
    """A limit of a partition that a job exceeds."""

    message: str
    qos_flag: str | None = None
    """Flag of a QOS that lifts the limit (sacctmgr(1), FLAGS of a QOS)."""


def check_request(request: JobRequest, site: Site, ask: RunQuery) -> tuple[list[str], list[Partition]]:
    """Check a job against its site. Return notes for the user and the partitions in which the job may run.

    Args:
        request: what the job requests.
        site: the site.
        ask: runs a Slurm command, for facts that are rarely needed.

    Raises:
        SpecError: the job cannot run as requested; the message has a line per reason.
    """
    if violations := list(_violated_conventions(request, site)):
        raise SpecError("\n".join(violations))
    candidates = candidate_partitions(request, site)
    if not candidates:
        return [], []
    exceeded = [list(exceeded_limits(request, partition, site)) for partition in candidates]
    lifting = _lifting_qos(site, ask) if any(exceeded) else {}
    fatal = [[limit.message for limit in limits if limit.qos_flag not in lifting] for limits in exceeded]
    suitable = [partition for partition, messages in zip(candidates, fatal, strict=True) if not messages]
    if not suitable:
        lines = dict.fromkeys(message for messages in fatal for message in messages)
        raise SpecError("\n".join([*lines, *suggest_partitions(request, candidates, site)]))
    notes = [
        f"{limit.message} This limit does not apply if the job's QOS is {join_or(lifting[limit.qos_flag])} "
        f"(QOS flag {limit.qos_flag})."
        for limit in (exceeded[0] if len(candidates) == 1 else ())
        if limit.qos_flag is not None
    ]
    partition = suitable[0]
    notes += _service_notes(request, partition)
    notes += _default_notes(request, partition, site)
    notes += _qos_notes(request, site, ask)
    return [*notes, *_requeue_notes(request, partition, site)], suitable


def candidate_partitions(request: JobRequest, site: Site) -> list[Partition]:
    """Return the partitions in which the job may run; empty if unknown."""
    if request.partitions:
        return [partition for partition in site.partitions if partition.name in request.partitions]
    if site.default_partition is not None and not (site.slurm and site.slurm.chooses_partition):
        return [site.default_partition]
    return [partition for partition in site.partitions if not partition.hidden]


def _violated_conventions(request: JobRequest, site: Site) -> Iterator[str]:
    """Yield violations of site rules, which only the site profile contains."""
    option, habits = request.memory_option, site.habits
    if option is not None and habits.memory_option == "refused":
        yield (
            f"Memory was requested ({request.origin(option)}), but this site rejects jobs with a memory "
            "request (memory_option: refused in the site profile). Remove the option. The site chooses the "
            "memory of a job."
        )
    if habits.needs_memory and option is None:
        yield "This site rejects jobs without a memory request (needs_memory in the site profile). Use --mem."
    if habits.needs_time and not request.is_given("time"):
        yield "This site rejects jobs without a time limit (needs_time in the site profile). Use --time."


def exceeded_limits(request: JobRequest, partition: Partition, site: Site) -> Iterator[ExceededLimit]:
    """Yield the limits of the partition that the job exceeds, although `sbatch --test-only` may accept it."""
    name, limit_s, time_s = partition.name, partition.max_time_s, request.time_limit_s
    lead_s, default_s = request.spec.stop_before_limit_s, partition.time_without_option_s
    if not request.is_given("time"):
        if default_s is not None and default_s <= lead_s:
            setting = "DefaultTime" if partition.default_time_s is not None else "MaxTime"
            yield ExceededLimit(
                f"Partition {name} ends a job without --time after {format_time_limit(default_s)} "
                f"({setting}), but the ranks stop and save {lead_s} s before the limit "
                "(--stop-before-limit), so there is no time to train. Set --time to a longer limit, or "
                "reduce --stop-before-limit."
            )
    elif limit_s is not None and (time_s is None or time_s > limit_s):
        time = "An unlimited time" if time_s is None else f"A time limit of {format_time_limit(time_s)}"
        yield ExceededLimit(
            f"{time} was requested ({request.origin('time')}), but partition {name} allows at most "
            f"{format_time_limit(limit_s)} (MaxTime). Use --time {format_time_limit(limit_s)} or less: "
            "the run saves before the limit and continues in the next attempt.",
            "PartitionTimeLimit",
        )
    if (num_nodes := request.spec.most_granted) < partition.min_nodes:
        yield ExceededLimit(
            f"The job requests {pluralize(num_nodes, 'node')} (--nodes), but partition {name} requires at "
            f"least {partition.min_nodes} per job (MinNodes). Request more nodes.",
            "PartitionMinNodes",
        )
    limit_mib, mib = partition.max_mem_per_node_mib, request.memory_per_node_mib
    if limit_mib is None and partition.max_mem_per_cpu_mib is None and site.slurm is not None:
        limit_mib = site.slurm.max_mem_per_node_mib
    if limit_mib is not None and mib > limit_mib and (option := request.memory_option):
        yield ExceededLimit(
            f"The job requests {_format_mib(mib)} of memory per node ({request.origin(option)}), but "
            f"partition {name} allows at most {_format_mib(limit_mib)} (MaxMemPerNode). Request less memory."
        )


def _format_mib(mib: int) -> str:
    return f"{mib // 1024}G" if mib % 1024 == 0 else f"{mib}M"


def suggest_partitions(request: JobRequest, refused: Sequence[Partition], site: Site) -> list[str]:
    """Return a sentence on the partitions that would accept the job unchanged; empty if there are none."""
    least = request.spec.least_granted
    names = [
        partition.name
        for partition in site.partitions
        if partition not in refused
        and partition.state == "UP"
        and not (partition.hidden or partition.root_only or partition.needs_reservation)
        and partition.allow_groups is None
        and least <= (partition.max_nodes or least)
        and (partition.allow_accounts is None or request.is_given("account"))
        and not [*exceeded_limits(request, partition, site)]
        and request.cpus_per_node <= (partition.max_cpus_per_node or request.cpus_per_node)
        and sum(group.num for group in partition.groups if _fits(request, group)) >= least
    ]
    if not names or request.value("constraint") or request.value("nodelist"):
        return []
    return [f"Partition {join_or(names)} would accept the job without changes (--partition)."]


def _fits(request: JobRequest, group: NodeGroup) -> bool:
    """Return true if the nodes are large enough; their features are not checked."""
    kind = request.spec.gpu_type
    return (
        (group.gpus.get(kind, 0) if kind else group.num_gpus) >= request.spec.gpus_per_node
        and group.cpus >= request.cpus_per_node
        and group.memory_mib >= request.memory_per_node_mib
    )


def waits_for_nodes(request: JobRequest, partitions: Sequence[Partition]) -> bool:
    """Return true if a partition has enough large nodes, but some are out of service.

    `sbatch --test-only` then rejects a job that sbatch accepts (seen with Slurm 22.05).
    """
    for partition in partitions:
        fitting = [group for group in partition.groups if _fits(request, group)]
        has_enough = sum(group.num for group in fitting) >= request.spec.least_granted
        if has_enough and not all(group.is_usable for group in fitting):
            return True
    return False


def _lifting_qos(site: Site, ask: RunQuery) -> Mapping[str | None, Sequence[str]]:
    """Return the names of the QOS with each flag that lifts a limit of partitions.

    Flags of a QOS have no effect unless QOS are enforced (seen with Slurm 22.05).
    """
    if site.slurm is None or "qos" not in site.slurm.enforced or site.slurm.enforces_limits != "NO":
        return {}
    every_qos: list[Qos] = []
    with suppress(SchedulerError):
        every_qos = query_qos(ask)
    flags = {flag for qos in every_qos for flag in qos.flags}
    return {flag: [qos.name for qos in every_qos if flag in qos.flags] for flag in flags}


def _service_notes(request: JobRequest, partition: Partition) -> Iterator[str]:
    least = request.spec.least_granted
    in_service = sum(group.num for group in partition.groups if not group.is_out and _fits(request, group))
    if partition.state == "DOWN":
        yield f"Partition {partition.name} is down. The job will wait until the partition is up again."
    elif partition.groups and in_service < least:
        number = f"only {pluralize(in_service, 'suitable node')}" if in_service else "no suitable nodes"
        yield (
            f"The job requests {pluralize(least, 'node')}, but according to sinfo, partition "
            f"{partition.name} has {number} in service now. The job will wait for more nodes."
        )


def _default_notes(request: JobRequest, partition: Partition, site: Site) -> Iterator[str]:
    """Yield what the site's defaults mean for a job without a time limit or a memory request."""
    defaults = {}
    if not request.is_given("time"):
        limit_s = partition.time_without_option_s
        defaults["--time"] = (
            "no time limit" if limit_s is None else f"a time limit of {format_time_limit(limit_s)}"
        )
    if request.memory_option is None and site.slurm is not None and site.slurm.hands_out_memory:
        per_cpu_mib = partition.def_mem_per_cpu_mib or site.slurm.def_mem_per_cpu_mib
        mib = partition.def_mem_per_node_mib or site.slurm.def_mem_per_node_mib
        if per_cpu_mib is not None and partition.def_mem_per_node_mib is None:
            mib = per_cpu_mib * request.cpus_per_node
        defaults["--mem"] = f"{_format_mib(mib)} of memory per node" if mib else "all memory of its nodes"
    if defaults:
        yield (
            f"Without {' and '.join(defaults)}, the job has {' and '.join(defaults.values())} (default of "
            f"partition {partition.name})."
        )


def _qos_notes(request: JobRequest, site: Site, ask: RunQuery) -> Iterator[str]:
    """Yield a note if the time limit exceeds that of the requested QOS, so that the job pends forever.

    Not an error, because a QOS of the partition may allow more.
    """
    name, time_s = request.value("qos"), request.time_limit_s
    if not name or time_s is None or site.slurm is None or "limits" not in site.slurm.enforced:
        return
    with suppress(SchedulerError):
        for qos in query_qos(ask):
            if qos.name == name and qos.max_time_s is not None and time_s > qos.max_time_s:
                limit = format_time_limit(qos.max_time_s)
                yield (
                    f"A time limit of {format_time_limit(time_s)} was requested ({request.origin('time')}), "
                    f"but QOS {name} allows at most {limit} (MaxWall). Unless the QOS of the partition "
                    f"allows more, the job will never start. Use --time {limit} or less."
                )


def is_preemptible(partition: Partition, site: Site) -> bool:
    """Return true if jobs of another partition can preempt jobs of the partition. QOS are not considered."""
    # PreemptMode of partitions only applies if jobs are preempted by partition tier (slurm.conf(5)).
    if site.slurm is None or site.slurm.preempt_type != "partition_prio" or partition.preempt_mode == "OFF":
        return False
    return any(other.priority_tier > partition.priority_tier for other in site.partitions)


def _requeue_notes(request: JobRequest, partition: Partition, site: Site) -> Iterator[str]:
    """Yield notes on the end of a job at a preemption or near the time limit.

    Seen with Slurm 22.05: a job with `--requeue` is requeued regardless of JobRequeue. If a preemption
    cancels a job, the supervisor can still requeue the job within the grace time, but not later.
    """
    mode, slurm = request.spec.resume_mode, site.slurm or SlurmConfig()
    has_successor = mode != "requeue"
    if not site.habits.requeue:
        end = f"{_SUCCESSOR_NOTE}." if has_successor else f"exits. {_RESUBMIT_HINT}"
        yield (
            "This site does not requeue jobs (requeue: false in the site profile). A run that is preempted "
            f"or approaches its time limit saves its state and {end}"
        )
    elif not slurm.job_requeue and mode == "auto":
        yield (
            "This site does not requeue jobs by default (JobRequeue=0). A run that is preempted or "
            f"approaches its time limit saves its state and {_SUCCESSOR_NOTE} (--resume-mode)."
        )
    if is_preemptible(partition, site) and partition.preempt_mode == "CANCEL" and not partition.grace_time_s:
        end = f"{_SUCCESSOR_NOTE}." if has_successor else f"ends as FAILED. {_RESUBMIT_HINT}"
        yield (
            f"A preempted job in partition {partition.name} is cancelled immediately, not requeued "
            f"(PreemptMode=CANCEL, GraceTime=0). The run has {slurm.kill_wait_s:g} s to save "
            f"(KillWait), and then {end}"
        )
