"""Checks of a job against the site that it is meant for, before it waits in the queue.

What is certain to be refused, or to wait for ever, is an error. The rest is a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.given import nearest
from hpctrain.jobs.site.facts import Partition, Qos, Site
from hpctrain.jobs.site.limits import limit_problems
from hpctrain.jobs.site.nodes import node_problems, nodes_in_service
from hpctrain.jobs.site.problem import Problem, plural
from hpctrain.jobs.site.read import Ask, read_qos
from hpctrain.jobs.site.request import Request
from hpctrain.jobs.site.requeue import requeue_notes


def check_site(request: Request, site: Site, ask: Ask) -> tuple[list[str], list[Partition]]:
    """Hold a job against its site: what the user should know, and the partitions in which the job may run.

    Args:
        request: what the job asks for.
        site: what the site is like.
        ask: runs one of Slurm's commands, for what is worth a question in rare cases only.

    Raises:
        SpecError: the job cannot be done as asked; the message has a line for each reason.
    """
    if problems := list(_general(request, site)):
        raise _refusal(problems)
    candidates = _candidates(request, site)
    if not candidates:
        return [], []
    lifting = cache(lambda: _every_qos(site, ask))  # asked for only when a limit is exceeded
    standing = {one.name: _standing(request, one, site, lifting) for one in candidates}
    open_to_it = [one for one in candidates if not standing[one.name][0]]
    must_fit_all = request.partitions and site.slurm is not None and site.slurm.enforces_limits == "ALL"
    if not open_to_it or (must_fit_all and len(open_to_it) < len(candidates)):
        raise _refusal(
            [problem for one in candidates for problem in standing[one.name][0]],
            _elsewhere(request, candidates, site),
        )
    notes = [note for one in open_to_it for note in standing[one.name][1]] if len(candidates) == 1 else []
    return [*notes, *_notes(request, open_to_it[0], site)], open_to_it


def _general(request: Request, site: Site) -> Iterator[Problem]:
    """What stands in the way whatever the partition."""
    known = {partition.name: None for partition in site.partitions}
    for name in request.partitions if known else ():
        if name not in known:
            hint = nearest(name, [one.name for one in site.partitions if not one.hidden])
            yield Problem(f"There is no partition {name!r} here ({request.origin('partition')}). {hint}")
    last, size = request.last_task, site.slurm.max_array_size if site.slurm else None
    if last is not None and size is not None and last >= size:
        yield Problem(
            f"Task {last} is asked for ({request.origin('array')}), but {size - 1} is the highest number "
            "here (MaxArraySize). Submit it in several arrays."
        )
    yield from _habits(request, site)


def _habits(request: Request, site: Site) -> Iterator[Problem]:
    """What the site's own rules say, which only its profile tells."""
    option, habits = request.memory_option, site.habits
    if option is not None and habits.memory_option == "refused":
        yield Problem(
            f"Memory is asked for ({request.origin(option)}), but this site refuses jobs that do so (its "
            "profile says memory_option: refused). Leave it out: a job gets the memory that belongs to its "
            "GPUs or CPUs."
        )
    refusals = {
        "memory": (habits.needs_memory and option is None, "needs_memory", "--mem"),
        "time limit": (habits.needs_time and not request.gives("time"), "needs_time", "--time"),
    }
    for what, (lacks, key, flag) in refusals.items():
        if lacks:
            yield Problem(
                f"This site refuses jobs that give no {what} (its profile says {key}: true). Give {flag}."
            )


def _candidates(request: Request, site: Site) -> list[Partition]:
    """The partitions in which the job may run; none where that cannot be told."""
    if request.partitions:
        return [one for one in site.partitions if one.name in request.partitions]
    if site.default_partition is not None and not (site.slurm and site.slurm.chooses_partition):
        return [site.default_partition]
    return [one for one in site.partitions if not one.hidden]


def _standing(
    request: Request, partition: Partition, site: Site, lifting: Callable[[], Sequence[Qos]]
) -> tuple[list[Problem], list[str]]:
    """What keeps the partition from running the job, and what would but for a QOS that may lift it."""
    hard, notes = [], []
    for problem in (*limit_problems(request, partition, site), *node_problems(request, partition)):
        lifted = (
            [qos.name for qos in lifting() if problem.lifted_by in qos.flags] if problem.lifted_by else []
        )
        if lifted:
            notes.append(
                f"{problem.words} Only where the job's QOS is {' or '.join(lifted)} does that not hold "
                f"({problem.lifted_by})."
            )
        else:
            hard.append(problem)
    return hard, notes


def _every_qos(site: Site, ask: Ask) -> Sequence[Qos]:
    """The QOS that may lift limits of partitions; none where nothing can.

    A flag of a QOS that is not enforced lifts nothing (seen with Slurm 22.05).
    """
    if site.slurm is None or "qos" not in site.slurm.enforced or site.slurm.enforces_limits != "NO":
        return []
    try:
        return read_qos(ask)
    except SchedulerError:
        return []


def _refusal(problems: Sequence[Problem], mend: str = "") -> SpecError:
    lines = list(dict.fromkeys(problem.words for problem in problems))
    return SpecError("\n".join([*lines, *([mend] if mend else [])]))


def _elsewhere(request: Request, refused: Sequence[Partition], site: Site) -> str:
    """The partitions that would take the job as it is."""
    names = [
        one.name
        for one in site.partitions
        if one not in refused
        and not one.hidden
        and one.state == "UP"
        and (one.allow_accounts is None or request.gives("account"))
        and not [*limit_problems(request, one, site), *node_problems(request, one)]
    ]
    if not names:
        return ""
    return f"As it is, the job fits partition {' or '.join(names)} (--partition)."


def _notes(request: Request, partition: Partition, site: Site) -> list[str]:
    notes = []
    if partition.state == "DOWN":
        notes.append(f"Partition {partition.name} is down: the job waits until it is up again.")
    elif partition.groups and (there := nodes_in_service(request, partition)) < request.spec.least_granted:
        fit = f"nodes of partition {partition.name} that fit the job"
        notes.append(
            f"{plural(request.spec.least_granted, 'node')} asked for, but {there or 'none'} of the {fit} in "
            "service for now (sinfo): it waits for more."
        )
    return [*notes, *requeue_notes(partition, site, request.spec.continue_by)]
