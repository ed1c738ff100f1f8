"""Comparison of a job's request with the limits of a partition.

Unless EnforcePartLimits is set, sbatch accepts a job that exceeds the limits, and the job pends forever;
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
    """Yield the reasons why the job cannot run in the partition."""
    if partition.state in _CLOSED:
        yield SiteProblem(
            f"Partition {partition.name} currently does not accept new jobs (State={partition.state}). "
            "Choose another --partition, or wait."
        )
    yield from _time(request, partition)
    yield from _size(request, partition)
    yield from _memory(request, partition, site)
    yield from _permission(request, partition)


def _time(request: JobRequest, partition: Partition) -> Iterator[SiteProblem]:
    limit, asked, lead_s = partition.max_time_s, request.time_limit_s, request.spec.stop_before_limit_s
    if not request.is_given("time"):
        if (given := partition.time_without_option_s) is not None and given <= lead_s:
            option = "DefaultTime" if partition.default_time_s is not None else "MaxTime"
            yield SiteProblem(
                f"Partition {partition.name} ends a job without --time after {format_time_limit(given)} "
                f"({option}), but the ranks stop and save {lead_s} s before the limit "
                "(--stop-before-limit), so there is no time to train. Set --time to a longer limit, or "
                "reduce --stop-before-limit."
            )
    elif limit is not None and (asked is None or asked > limit):
        what = "An unlimited time" if asked is None else f"A time limit of {format_time_limit(asked)}"
        yield SiteProblem(
            f"{what} was requested ({request.origin('time')}), but partition {partition.name} allows at most "
            f"{format_time_limit(limit)} (MaxTime). Use --time {format_time_limit(limit)} or less: "
            "the run saves before the limit and continues in the next attempt.",
            lifted_by="PartitionTimeLimit",
        )


def _size(request: JobRequest, partition: Partition) -> Iterator[SiteProblem]:
    least, nodes, cpus = request.spec.least_granted, request.spec.most_granted, request.cpus_per_node
    number = pluralize(nodes, "node") if least == nodes else f"{least} to {nodes} nodes"
    asked = f"The job requests {number} (--nodes)"
    # For a range of nodes, Slurm allocates what the partition allows.
    if partition.max_nodes is not None and least > partition.max_nodes:
        yield SiteProblem(
            f"{asked}, but partition {partition.name} allows at most {partition.max_nodes} per job "
            "(MaxNodes). Request fewer nodes.",
            lifted_by="PartitionMaxNodes",
        )
    if nodes < partition.min_nodes:
        yield SiteProblem(
            f"{asked}, but partition {partition.name} requires at least {partition.min_nodes} per job "
            "(MinNodes). Request more nodes.",
            lifted_by="PartitionMinNodes",
        )
    if partition.max_cpus_per_node is not None and cpus > partition.max_cpus_per_node:
        yield SiteProblem(
            f"The job requests {pluralize(cpus, 'CPU')} per node (ranks per node × --cpus-per-task), but "
            f"partition {partition.name} allows at most {partition.max_cpus_per_node} (MaxCPUsPerNode). "
            "Request fewer CPUs."
        )


def _memory(request: JobRequest, partition: Partition, site: Site) -> Iterator[SiteProblem]:
    limit = partition.max_mem_per_node_mib
    if limit is None and partition.max_mem_per_cpu_mib is None and site.slurm is not None:
        limit = site.slurm.max_mem_per_node_mib
    asked = request.memory_per_node_mib
    if limit is not None and asked > limit and (option := request.memory_option):
        yield SiteProblem(
            f"The job requests {format_memory(asked)} of memory per node ({request.origin(option)}), but "
            f"partition {partition.name} allows at most {format_memory(limit)} (MaxMemPerNode). Request "
            "less memory."
        )


def _permission(request: JobRequest, partition: Partition) -> Iterator[SiteProblem]:
    for key, allowed, denied, name in (
        ("account", partition.allow_accounts, partition.deny_accounts, "Account"),
        ("qos", partition.allow_qos, partition.deny_qos, "QOS"),
    ):
        if not (asked := request.value(key)):
            continue
        setting = "Accounts" if key == "account" else "Qos"
        said = f"{name} {asked!r} was requested ({request.origin(key)}), but partition {partition.name}"
        # Subaccounts of the allowed accounts are allowed, too (slurm.conf, AllowAccounts).
        if allowed is not None and asked not in allowed and key == "qos":
            yield SiteProblem(
                f"{said} allows only {', '.join(allowed)} (Allow{setting}). Choose one of these."
            )
        # If there is an allow list, Slurm ignores the deny list.
        elif allowed is None and asked in denied:
            yield SiteProblem(
                f"{said} denies this {name.lower() if key == 'account' else name} "
                f"(Deny{setting}). Choose another."
            )
    # Root is exempt.
    if os.geteuid() != 0:
        yield from _personal(partition)
    if partition.needs_reservation and not request.is_given("reservation"):
        yield SiteProblem(
            f"Partition {partition.name} accepts only jobs with a reservation (ReqResv). Use --reservation."
        )


def _personal(partition: Partition) -> Iterator[SiteProblem]:
    if partition.root_only:
        yield SiteProblem(
            f"Partition {partition.name} is for root only (RootOnly). Choose another --partition."
        )
    groups = partition.allow_groups
    if groups is not None and not _own_groups().intersection(groups):
        yield SiteProblem(
            f"Partition {partition.name} is only for the groups {', '.join(groups)} (AllowGroups), but you "
            "are not a member of any of them. Choose another --partition, or ask the administrator to add "
            "you to a group."
        )


def _own_groups() -> set[str]:
    names = set()
    for gid in {os.getegid(), *os.getgroups()}:
        try:
            names.add(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return names
