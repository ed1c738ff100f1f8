"""Comparison of a job's request with the nodes of a partition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from hpctrain.errors import UserError
from hpctrain.jobs.site.job_request import JobRequest
from hpctrain.jobs.site.problem import SiteProblem, format_memory
from hpctrain.slurm.site_facts import NodeGroup, Partition
from hpctrain.text import pluralize, suggest

#: The features of a constraint are separated by operators, counts and brackets (sbatch(1), --constraint).
_FEATURE = re.compile(r"[^&|,()\[\]*\s]+(?:\*\d+)?")
#: For partitions with more nodes, similar names are not suggested.
_MANY = 1000


def node_problems(request: JobRequest, partition: Partition) -> Iterator[SiteProblem]:
    """Yield the reasons why the partition's nodes cannot run the job; none if its nodes are unknown."""
    if not partition.groups:
        return
    wrong_words = [*_gpu_type(request, partition), *_features(request, partition)]
    wrong_words += _names(request, partition)
    yield from wrong_words
    if not wrong_words:
        yield from _capacity_problems(request, partition)


def nodes_in_service(request: JobRequest, partition: Partition) -> int:
    """Return the number of suitable nodes that are not down, drained or in maintenance."""
    return sum(group.num for group in partition.groups if not group.is_out and _fits(request, group))


def _gpu_type(request: JobRequest, partition: Partition) -> Iterator[SiteProblem]:
    asked = request.spec.gpu_type
    known = list(dict.fromkeys(kind for group in partition.groups for kind in group.gpus if kind))
    if asked and asked not in known:
        hint = (
            f"Its GPU types are {', '.join(known)}."
            if known
            else "It defines no GPU types. Use a number without a type."
        )
        yield SiteProblem(
            f"GPU type {asked!r} was requested (--gpus-per-node), but according to sinfo, partition "
            f"{partition.name} has no such GPUs. {hint}"
        )


def _features(request: JobRequest, partition: Partition) -> Iterator[SiteProblem]:
    known = list(dict.fromkeys(feature for group in partition.groups for feature in group.features))
    for word in _feature_names(request.value("constraint")):
        if word not in known:
            hint = suggest(word, known) if known else "Its nodes have no features. Remove the option."
            yield SiteProblem(
                f"Feature {word!r} was requested ({request.origin('constraint')}), but according to sinfo, "
                f"no node of partition {partition.name} has this feature. {hint}"
            )


def _feature_names(constraint: str) -> list[str]:
    return [word.partition("*")[0] for word in _FEATURE.findall(constraint)]


def _names(request: JobRequest, partition: Partition) -> Iterator[SiteProblem]:
    if not (asked := _hosts(request.value("nodelist"))):
        return
    known = {name: None for group in partition.groups for name in _hosts(group.names)}
    for name in asked:
        if name not in known:
            hint = suggest(name, known) if len(known) < _MANY else "Check its name."
            yield SiteProblem(
                f"Node {name} was requested ({request.origin('nodelist')}), but according to sinfo, this "
                f"node is not in partition {partition.name}. {hint}"
            )


def _hosts(hostlist: str) -> list[str]:
    """Return the nodes of a hostlist; an empty result for a file name."""
    if not hostlist or "/" in hostlist:
        return []
    from hpctrain.cluster import expand_hostlist

    try:
        return expand_hostlist(hostlist)
    except UserError:
        return []


def _capacity_problems(request: JobRequest, partition: Partition) -> Iterator[SiteProblem]:
    """Yield the first demand that exceeds every node, or report a lack of suitable nodes."""
    where = f"partition {partition.name}"
    for asked, amount, words, mend in _demands(request):
        most = max(map(amount, partition.groups))
        if asked > most:
            yield SiteProblem(
                f"{words}, but according to sinfo, no node of {where} has more than {most}. {mend}"
            )
            return
    fitting = sum(group.num for group in partition.groups if _fits(request, group))
    excluded = len(set(_hosts(request.value("exclude"))) & _fitting_names(request, partition))
    if request.spec.least_granted > fitting - excluded:
        less = f", of which --exclude excludes {excluded}" if excluded else ""
        such = f"only {pluralize(fitting, 'such node')}" if fitting else "no such nodes"
        yield SiteProblem(
            f"The job requests {pluralize(request.spec.least_granted, 'node')}{_describe_demands(request)} "
            f"(--nodes), but according to sinfo, {where} has {such}{less}. Request fewer nodes, or "
            "choose another --partition."
        )


def _demands(request: JobRequest) -> Iterator[tuple[int, Callable[[NodeGroup], int], str, str]]:
    """Yield each demand per node: requested amount, amount of a node group, description, remedy."""
    spec = request.spec
    yield (
        spec.gpus_per_node,
        lambda group: _gpus(request, group),
        f"The job requests {_gpu_words(request)} per node (--gpus-per-node)",
        "Request fewer GPUs, or choose another --partition.",
    )
    cpus = f"{pluralize(spec.ntasks_per_node, 'rank')} × --cpus-per-task {spec.cpus_per_task or 1}"
    yield (
        request.cpus_per_node,
        lambda group: group.cpus,
        f"The job requests {pluralize(request.cpus_per_node, 'CPU')} per node ({cpus})",
        "Request fewer CPUs.",
    )
    origin = request.origin(request.memory_option or "mem")
    yield (
        request.memory_per_node_mib,
        lambda group: group.memory_mib,
        f"The job requests {request.memory_per_node_mib} MiB of memory per node ({origin})",
        "Request less memory.",
    )


def _describe_demands(request: JobRequest) -> str:
    """Describe the demands on each node."""
    spec, demands = request.spec, []
    if spec.gpus_per_node:
        demands.append(_gpu_words(request))
    if request.cpus_per_node > max(1, spec.gpus_per_node):
        demands.append(pluralize(request.cpus_per_node, "CPU"))
    if request.memory_per_node_mib:
        demands.append(f"{format_memory(request.memory_per_node_mib)} of memory")
    each = [f"{', '.join(demands)} each"] if demands else []
    if constraint := request.value("constraint"):
        each.append(f"the features {constraint}")
    return f" with {' and '.join(each)}" if each else ""


def _gpu_words(request: JobRequest) -> str:
    kind = f"{request.spec.gpu_type} " if request.spec.gpu_type else ""
    return pluralize(request.spec.gpus_per_node, f"{kind}GPU")


def _fitting_names(request: JobRequest, partition: Partition) -> set[str]:
    if not request.value("exclude"):
        return set()
    return {name for group in partition.groups if _fits(request, group) for name in _hosts(group.names)}


def _gpus(request: JobRequest, group: NodeGroup) -> int:
    kind = request.spec.gpu_type
    return group.gpus.get(kind, 0) if kind else group.num_gpus


def _fits(request: JobRequest, group: NodeGroup) -> bool:
    return (
        _gpus(request, group) >= request.spec.gpus_per_node
        and group.cpus >= request.cpus_per_node
        and group.memory_mib >= request.memory_per_node_mib
        and _has_features(request.value("constraint"), group)
    )


def _has_features(constraint: str, group: NodeGroup) -> bool:
    """Return true if such a node may be allocated. Only features joined by & or | alone are evaluated."""
    words = _feature_names(constraint)
    if any(mark in constraint for mark in "()[]*,") or ("|" in constraint and "&" in constraint):
        return True
    if "|" in constraint:
        return any(word in group.features for word in words)
    return all(word in group.features for word in words)
