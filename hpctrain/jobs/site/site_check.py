"""Checks of a job against its site, before it waits in the queue.

A job that would certainly be rejected or pend forever is an error. Other findings are notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.site.job_request import JobRequest
from hpctrain.jobs.site.node_requirements import node_problems, nodes_in_service
from hpctrain.jobs.site.partition_limits import limit_problems
from hpctrain.jobs.site.problem import SiteProblem, format_memory
from hpctrain.jobs.site.requeue_notes import requeue_notes
from hpctrain.slurm.duration import format_time_limit
from hpctrain.slurm.site_discovery import RunQuery, query_qos
from hpctrain.slurm.site_facts import Partition, Qos, Site
from hpctrain.text import join_or, pluralize, suggest


def check_request(request: JobRequest, site: Site, ask: RunQuery) -> tuple[list[str], list[Partition]]:
    """Check a job against its site. Return notes for the user and the partitions in which the job may run.

    Args:
        request: what the job requests.
        site: the site.
        ask: runs a Slurm command, for facts that are rarely needed.

    Raises:
        SpecError: the job cannot run as requested; the message has a line per reason.
    """
    if problems := list(_general(request, site)):
        raise _refusal(problems)
    candidates = _candidates(request, site)
    if not candidates:
        return [], []
    lifting = cache(lambda: _every_qos(site, ask))  # queried only if a limit is exceeded
    standing = {one.name: _sort_problems(request, one, site, lifting) for one in candidates}
    open_to_it = [one for one in candidates if not standing[one.name][0]]
    must_fit_all = request.partitions and site.slurm is not None and site.slurm.enforces_limits == "ALL"
    if not open_to_it or (must_fit_all and len(open_to_it) < len(candidates)):
        raise _refusal(
            [problem for one in candidates for problem in standing[one.name][0]],
            _suggest_partitions(request, candidates, site),
        )
    notes = [note for one in open_to_it for note in standing[one.name][1]] if len(candidates) == 1 else []
    return [*notes, *_notes(request, open_to_it[0], site, ask)], open_to_it


def _general(request: JobRequest, site: Site) -> Iterator[SiteProblem]:
    """Yield the problems that do not depend on the partition."""
    known = {partition.name: None for partition in site.partitions}
    for name in request.partitions if known else ():
        if name not in known:
            hint = suggest(name, [one.name for one in site.partitions if not one.hidden])
            yield SiteProblem(f"Unknown partition {name!r} ({request.origin('partition')}). {hint}")
    last, size = request.last_task, site.slurm.max_array_size if site.slurm else None
    if last is not None and size is not None and last >= size:
        yield SiteProblem(
            f"Task {last} was requested ({request.origin('array')}), but the highest task number at "
            f"this site is {size - 1} (MaxArraySize). Use smaller task numbers, or submit "
            "several arrays."
        )
    yield from _habits(request, site)


def _habits(request: JobRequest, site: Site) -> Iterator[SiteProblem]:
    """Yield violations of site rules, which only the site profile contains."""
    option, habits = request.memory_option, site.habits
    if option is not None and habits.memory_option == "refused":
        yield SiteProblem(
            f"Memory was requested ({request.origin(option)}), but this site rejects jobs with a memory "
            "request (memory_option: refused in the site profile). Remove the option. The site chooses the "
            "memory of a job."
        )
    refusals = {
        "memory request": (habits.needs_memory and option is None, "needs_memory", "--mem"),
        "time limit": (habits.needs_time and not request.is_given("time"), "needs_time", "--time"),
    }
    for what, (lacks, key, flag) in refusals.items():
        if lacks:
            yield SiteProblem(
                f"This site rejects jobs without a {what} ({key}: true in the site profile). Use {flag}."
            )


def _candidates(request: JobRequest, site: Site) -> list[Partition]:
    """Return the partitions in which the job may run; empty if unknown."""
    if request.partitions:
        return [one for one in site.partitions if one.name in request.partitions]
    if site.default_partition is not None and not (site.slurm and site.slurm.chooses_partition):
        return [site.default_partition]
    return [one for one in site.partitions if not one.hidden]


def _sort_problems(
    request: JobRequest, partition: Partition, site: Site, lifting: Callable[[], Sequence[Qos]]
) -> tuple[list[SiteProblem], list[str]]:
    """Return the problems that prevent the job, and notes on those that a QOS may lift."""
    hard, notes = [], []
    for problem in (*limit_problems(request, partition, site), *node_problems(request, partition)):
        lifted = (
            [qos.name for qos in lifting() if problem.lifted_by in qos.flags] if problem.lifted_by else []
        )
        if lifted:
            notes.append(
                f"{problem.message} This limit does not apply if the job's QOS is {join_or(lifted)} "
                f"(QOS flag {problem.lifted_by})."
            )
        else:
            hard.append(problem)
    return hard, notes


def _every_qos(site: Site, ask: RunQuery) -> Sequence[Qos]:
    """Return the QOS that may lift limits of partitions; empty if there are none.

    Flags of a QOS have no effect unless QOS are enforced (seen with Slurm 22.05).
    """
    if site.slurm is None or "qos" not in site.slurm.enforced or site.slurm.enforces_limits != "NO":
        return []
    try:
        return query_qos(ask)
    except SchedulerError:
        return []


def _qos_notes(request: JobRequest, site: Site, ask: RunQuery) -> Iterator[str]:
    """Yield a note if the time limit exceeds that of the requested QOS, so that the job pends forever.

    Not an error, because a QOS of the partition may allow more.
    """
    name, asked = request.value("qos"), request.time_limit_s
    if not name or asked is None or site.slurm is None or "limits" not in site.slurm.enforced:
        return
    with suppress(SchedulerError):
        for qos in query_qos(ask):
            if qos.name == name and qos.max_time_s is not None and asked > qos.max_time_s:
                most = format_time_limit(qos.max_time_s)
                yield (
                    f"A time limit of {format_time_limit(asked)} was requested ({request.origin('time')}), "
                    f"but QOS {name} allows at most {most} (MaxWall). Unless the QOS of the partition allows "
                    f"more, the job will never start. Use --time {most} or less."
                )


def _default_notes(request: JobRequest, partition: Partition, site: Site) -> Iterator[str]:
    """Yield what the site's defaults mean for a job without a time limit or a memory request."""
    options, defaults = [], []
    if not request.is_given("time"):
        limit = partition.time_without_option_s
        options.append("--time")
        defaults.append("no time limit" if limit is None else f"a time limit of {format_time_limit(limit)}")
    if request.memory_option is None and site.slurm is not None and site.slurm.hands_out_memory:
        per_cpu = partition.def_mem_per_cpu_mib or site.slurm.def_mem_per_cpu_mib
        memory = partition.def_mem_per_node_mib or site.slurm.def_mem_per_node_mib
        if per_cpu is not None and partition.def_mem_per_node_mib is None:
            memory = per_cpu * request.cpus_per_node
        options.append("--mem")
        defaults.append(
            f"{format_memory(memory)} of memory per node" if memory else "all memory of its nodes"
        )
    if options:
        yield (
            f"Without {' and '.join(options)}, the job has {' and '.join(defaults)} (default of partition "
            f"{partition.name})."
        )


def _refusal(problems: Sequence[SiteProblem], mend: str = "") -> SpecError:
    lines = list(dict.fromkeys(problem.message for problem in problems))
    return SpecError("\n".join([*lines, *([mend] if mend else [])]))


def _suggest_partitions(request: JobRequest, refused: Sequence[Partition], site: Site) -> str:
    """Return a sentence on the partitions that would accept the job unchanged."""
    names = [
        one.name
        for one in site.partitions
        if one not in refused
        and not one.hidden
        and one.state == "UP"
        and (one.allow_accounts is None or request.is_given("account"))
        and not [*limit_problems(request, one, site), *node_problems(request, one)]
    ]
    if not names:
        return ""
    return f"Partition {join_or(names)} would accept the job without changes (--partition)."


def _notes(request: JobRequest, partition: Partition, site: Site, ask: RunQuery) -> list[str]:
    notes = []
    if partition.state == "DOWN":
        notes.append(
            f"Partition {partition.name} is down. The job will wait until the partition is up again."
        )
    elif partition.groups and (there := nodes_in_service(request, partition)) < request.spec.least_granted:
        number = f"only {pluralize(there, 'suitable node')}" if there else "no suitable nodes"
        notes.append(
            f"The job requests {pluralize(request.spec.least_granted, 'node')}, but according to sinfo, "
            f"partition {partition.name} has {number} in service now. The job will wait for more nodes."
        )
    notes += _default_notes(request, partition, site)
    notes += _qos_notes(request, site, ask)
    return [*notes, *requeue_notes(partition, site, request.spec.resume_mode)]
