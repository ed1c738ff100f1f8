"""The limits of a partition, against what a job asks for.

Unless EnforcePartLimits is set, sbatch takes a job that exceeds them, and the job waits for ever;
`--test-only` foretells it a start all the same (seen with Slurm 22.05).
"""

from __future__ import annotations

import grp
import os
from collections.abc import Iterator

from hpctrain.jobs.site.facts import Partition, Site
from hpctrain.jobs.site.problem import Problem, duration, memory, plural
from hpctrain.jobs.site.request import Request

#: States in which a partition takes no job (slurm.conf(5), State of a partition).
_CLOSED = ("DRAIN", "INACTIVE")


def limit_problems(request: Request, partition: Partition, site: Site) -> Iterator[Problem]:
    """Why the partition would not run the job."""
    if partition.state in _CLOSED:
        yield Problem(
            f"Partition {partition.name} takes no jobs for now (State={partition.state}). "
            "Take another --partition, or wait."
        )
    yield from _time(request, partition)
    yield from _size(request, partition)
    yield from _memory(request, partition, site)
    yield from _permission(request, partition)


def _time(request: Request, partition: Partition) -> Iterator[Problem]:
    limit, asked, lead_s = partition.max_time_s, request.time_limit_s, request.spec.signal_lead_s
    if not request.gives("time"):
        if (given := partition.time_without_option_s) is not None and given <= lead_s:
            option = "DefaultTime" if partition.default_time_s is not None else "MaxTime"
            yield Problem(
                f"Partition {partition.name} ends a job that gives no --time after {duration(given)} "
                f"({option}), which is not longer than the {lead_s} s before its end at which the ranks are "
                "told to save (--signal-lead), so nothing would be trained. Give a longer --time or a "
                "shorter --signal-lead."
            )
    elif limit is not None and (asked is None or asked > limit):
        what = "No time limit" if asked is None else f"A time limit of {duration(asked)}"
        yield Problem(
            f"{what} is asked for ({request.origin('time')}), but partition "
            f"{partition.name} allows {duration(limit)} (MaxTime). Give --time {duration(limit)} or less: "
            "the run saves before it, and goes on in the next attempt.",
            lifted_by="PartitionTimeLimit",
        )


def _size(request: Request, partition: Partition) -> Iterator[Problem]:
    least, nodes, cpus = request.spec.least_granted, request.spec.most_granted, request.cpus_per_node
    number = plural(nodes, "node") if least == nodes else f"{least} to {nodes} nodes"
    asked = f"{number} {'is' if nodes == 1 else 'are'} asked for (--nodes)"
    # Of a range, Slurm takes what the partition allows.
    if partition.max_nodes is not None and least > partition.max_nodes:
        yield Problem(
            f"{asked}, but partition {partition.name} gives a job {partition.max_nodes} (MaxNodes). "
            "Ask for fewer.",
            lifted_by="PartitionMaxNodes",
        )
    if nodes < partition.min_nodes:
        yield Problem(
            f"{asked}, but a job in partition {partition.name} has at least {partition.min_nodes} "
            "(MinNodes). Ask for more.",
            lifted_by="PartitionMinNodes",
        )
    if partition.max_cpus_per_node is not None and cpus > partition.max_cpus_per_node:
        yield Problem(
            f"{plural(cpus, 'CPU')} of each node are asked for (ranks × --cpus-per-task), but partition "
            f"{partition.name} gives a job {partition.max_cpus_per_node} (MaxCPUsPerNode). Ask for fewer."
        )


def _memory(request: Request, partition: Partition, site: Site) -> Iterator[Problem]:
    limit = partition.max_mem_per_node_mib
    if limit is None and partition.max_mem_per_cpu_mib is None and site.slurm is not None:
        limit = site.slurm.max_mem_per_node_mib
    asked = request.memory_per_node_mib
    if limit is not None and asked > limit and (option := request.memory_option):
        yield Problem(
            f"{memory(asked)} of memory on each node are asked for ({request.origin(option)}), but partition "
            f"{partition.name} gives a job {memory(limit)} (MaxMemPerNode). Ask for less."
        )


def _permission(request: Request, partition: Partition) -> Iterator[Problem]:
    for key, allowed, denied, name in (
        ("account", partition.allow_accounts, partition.deny_accounts, "Accounts"),
        ("qos", partition.allow_qos, partition.deny_qos, "Qos"),
    ):
        if not (asked := request.word(key)):
            continue
        said = f"{key} {asked!r} is asked for ({request.origin(key)}), but partition {partition.name}"
        if allowed is not None and asked not in allowed:
            yield Problem(f"{said} is for {', '.join(allowed)} (Allow{name}). Take one of them.")
        # Where it is said who may, Slurm does not look at who may not.
        elif allowed is None and asked in denied:
            yield Problem(f"{said} refuses it (Deny{name}). Take another.")
    # Root may do what others may not.
    if os.geteuid() != 0:
        yield from _personal(partition)
    if partition.needs_reservation and not request.gives("reservation"):
        yield Problem(
            f"Partition {partition.name} runs only jobs of a reservation (ReqResv). Give --reservation."
        )


def _personal(partition: Partition) -> Iterator[Problem]:
    if partition.root_only:
        yield Problem(f"Partition {partition.name} is for root alone (RootOnly). Take another --partition.")
    groups = partition.allow_groups
    if groups is not None and not _own_groups().intersection(groups):
        yield Problem(
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
