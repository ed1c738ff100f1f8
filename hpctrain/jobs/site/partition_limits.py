"""Comparison of a job's request with the limits of a partition.

Unless EnforcePartLimits is set, sbatch accepts a job that exceeds them, and the job pends forever;
`--test-only` predicts a start nevertheless (seen with Slurm 22.05).
"""

from __future__ import annotations

import grp
import os
from collections.abc import Iterator

from hpctrain.jobs.site.job_request import JobRequest
from hpctrain.jobs.site.problem import SiteProblem, format_memory
from hpctrain.slurm.duration import format_time_limit
from hpctrain.slurm.site_facts import Partition, Site
from hpctrain.text import pluralize

#: States in which a partition accepts no jobs (slurm.conf(5), State of a partition).
_CLOSED = ("DRAIN", "INACTIVE")


def limit_problems(request: JobRequest, partition: Partition, site: Site) -> Iterator[SiteProblem]:
    """Yield the reasons why the partition would not run the job."""
    if partition.state in _CLOSED:
        yield SiteProblem(
            f"Partition {partition.name} takes no jobs for now (State={partition.state}). "
            "Take another --partition, or wait."
        )
    yield from _time(request, partition)
    yield from _size(request, partition)
    yield from _memory(request, partition, site)
    yield from _permission(request, partition)


def _time(request: JobRequest, partition: Partition) -> Iterator[SiteProblem]:
    limit, asked, lead_s = partition.max_time_s, request.time_limit_s, request.spec.stop_before_limit_s
    if not request.gives("time"):
        if (given := partition.time_without_option_s) is not None and given <= lead_s:
            option = "DefaultTime" if partition.default_time_s is not None else "MaxTime"
            yield SiteProblem(
                f"Partition {partition.name} ends a job that gives no --time after "
                f"{format_time_limit(given)} "
                f"({option}), which is not longer than the {lead_s} s before its end at which the ranks are "
                "told to save (--stop-before-limit), so nothing would be trained. Give a longer --time or a "
                "shorter --stop-before-limit."
            )
    elif limit is not None and (asked is None or asked > limit):
        what = "No time limit" if asked is None else f"A time limit of {format_time_limit(asked)}"
        yield SiteProblem(
            f"{what} is asked for ({request.origin('time')}), but partition "
            f"{partition.name} allows {format_time_limit(limit)} (MaxTime). Give --time "
            f"{format_time_limit(limit)} or less: "
            "the run saves before it, and goes on in the next attempt.",
            lifted_by="PartitionTimeLimit",
        )


def _size(request: JobRequest, partition: Partition) -> Iterator[SiteProblem]:
    least, nodes, cpus = request.spec.least_granted, request.spec.most_granted, request.cpus_per_node
    number = pluralize(nodes, "node") if least == nodes else f"{least} to {nodes} nodes"
    asked = f"{number} requested (--nodes)"
    # For a range of nodes, Slurm allocates what the partition allows.
    if partition.max_nodes is not None and least > partition.max_nodes:
        yield SiteProblem(
            f"{asked}, but partition {partition.name} gives a job {partition.max_nodes} (MaxNodes). "
            "Ask for fewer.",
            lifted_by="PartitionMaxNodes",
        )
    if nodes < partition.min_nodes:
        yield SiteProblem(
            f"{asked}, but a job in partition {partition.name} has at least {partition.min_nodes} "
            "(MinNodes). Ask for more.",
            lifted_by="PartitionMinNodes",
        )
    if partition.max_cpus_per_node is not None and cpus > partition.max_cpus_per_node:
        yield SiteProblem(
            f"{pluralize(cpus, 'CPU')} per node requested (ranks × --cpus-per-task), but partition "
            f"{partition.name} gives a job {partition.max_cpus_per_node} (MaxCPUsPerNode). Ask for fewer."
        )


def _memory(request: JobRequest, partition: Partition, site: Site) -> Iterator[SiteProblem]:
    limit = partition.max_mem_per_node_mib
    if limit is None and partition.max_mem_per_cpu_mib is None and site.slurm is not None:
        limit = site.slurm.max_mem_per_node_mib
    asked = request.memory_per_node_mib
    if limit is not None and asked > limit and (option := request.memory_option):
        yield SiteProblem(
            f"{format_memory(asked)} of memory on each node are asked for "
            f"({request.origin(option)}), but partition "
            f"{partition.name} gives a job {format_memory(limit)} (MaxMemPerNode). Ask for less."
        )


def _permission(request: JobRequest, partition: Partition) -> Iterator[SiteProblem]:
    for key, allowed, denied, name in (
        ("account", partition.allow_accounts, partition.deny_accounts, "Accounts"),
        ("qos", partition.allow_qos, partition.deny_qos, "Qos"),
    ):
        if not (asked := request.word(key)):
            continue
        said = f"{key} {asked!r} is asked for ({request.origin(key)}), but partition {partition.name}"
        if allowed is not None and asked not in allowed:
            yield SiteProblem(f"{said} is for {', '.join(allowed)} (Allow{name}). Take one of them.")
        # If there is an allow list, Slurm ignores the deny list.
        elif allowed is None and asked in denied:
            yield SiteProblem(f"{said} refuses it (Deny{name}). Take another.")
    # Root is exempt.
    if os.geteuid() != 0:
        yield from _personal(partition)
    if partition.needs_reservation and not request.gives("reservation"):
        yield SiteProblem(
            f"Partition {partition.name} runs only jobs of a reservation (ReqResv). Give --reservation."
        )


def _personal(partition: Partition) -> Iterator[SiteProblem]:
    if partition.root_only:
        yield SiteProblem(
            f"Partition {partition.name} is for root alone (RootOnly). Take another --partition."
        )
    groups = partition.allow_groups
    if groups is not None and not _own_groups().intersection(groups):
        yield SiteProblem(
            f"Partition {partition.name} is for members of {', '.join(groups)} (AllowGroups), and you are in "
            "none of these groups. Take another --partition, or ask to become a member."
        )


def _own_groups() -> set[str]:
    names = set()
    for gid in {os.getegid(), *os.getgroups()}:
        try:
            names.add(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return names
