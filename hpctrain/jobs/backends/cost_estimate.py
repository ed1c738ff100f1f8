"""Estimate the maximum cost of a job in GPU-hours."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.jobs.backends.job_request import JobRequest
from hpctrain.slurm.job_array import JobArray
from hpctrain.slurm.parsing import format_time_limit
from hpctrain.slurm.site_facts import Partition, Site
from hpctrain.text import join_or, pluralize


def estimate_cost(request: JobRequest, partitions: Sequence[Partition], site: Site) -> str:
    spec = request.spec
    num_tasks = len(JobArray.parse(array).indices) if (array := request.value("array")) else 1
    gpus, cpus = spec.gpus_per_node, request.cpus_per_node
    groups = [group for partition in partitions for group in partition.groups if group.num_gpus >= gpus]
    is_linear = site.slurm is not None and site.slurm.select == "linear"
    whole_nodes = request.whole_nodes or is_linear or any(partition.whole_nodes for partition in partitions)
    if groups and whole_nodes:
        gpus = max(group.num_gpus for group in groups) if gpus else 0
        cpus = max(group.cpus for group in groups)
    amount, unit = (gpus, "GPU") if gpus else (cpus, "CPU")
    size = f"{pluralize(spec.nodes, 'node')} × {pluralize(amount, unit)}"
    if num_tasks > 1:
        size = f"{num_tasks} tasks × {size}"
    limits = (
        [request.time_limit_s]
        if "time" in request.directives
        else [partition.time_without_option_s for partition in partitions]
    )
    if not limits or None in limits:
        name = " " + join_or(partition.name for partition in partitions) if partitions else ""
        return f"No cost estimate ({size}): neither --time nor partition{name} sets a time limit."
    limit_s = max(limit for limit in limits if limit is not None)
    hours = num_tasks * spec.most_granted * amount * limit_s / 3600
    cost = pluralize(round(hours, 2) if hours < 100 else round(hours), f"{unit}-hour")
    return f"Maximum cost: {cost} ({size} × {format_time_limit(limit_s)}) per allocation."
