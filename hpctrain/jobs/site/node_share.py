"""Choose the CPUs per rank by the job's share of the GPUs of its nodes."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.slurm.site_facts import NodeGroup, Partition, Site

#: With fewer CPUs per rank, data workers compete with the training process.
_MIN_CPUS = 2


def choose_cpus_per_task(
    site: Site,
    partitions: Sequence[str],
    *,
    gpus_per_node: int,
    gpu_type: str | None,
    ntasks_per_node: int,
    whole_nodes: bool,
) -> tuple[int | None, str]:
    """Return the CPUs of each rank, and a note for the user; None if the nodes are unknown.

    A job that uses half of the GPUs of a node gets half of its CPUs, so that other jobs can use the rest.
    Without `partitions`, the job uses the default partition.
    """
    candidates = [site.partition(name) for name in partitions] or [site.default_partition]
    shares = [
        (_share(group, partition, gpus_per_node, whole_nodes) // ntasks_per_node, group, partition)
        for partition in candidates
        if partition is not None
        for group in partition.groups
        if gpus_per_node <= (group.gpus.get(gpu_type, 0) if gpu_type else group.num_gpus)
    ]
    if not shares:
        return None, (
            "The CPUs of the nodes are unknown, so each rank gets Slurm's default, usually 1 CPU. Choose "
            "another number with --cpus-per-task."
        )
    share, group, partition = min(shares, key=lambda entry: entry[0])
    cpus = max(1, share)
    note = (
        f"Each rank gets {cpus} of the {group.cpus} CPUs of a node (--cpus-per-task {cpus}): the share of "
        f"its GPUs in partition {partition.name}, whose nodes have {group.num_gpus} GPUs."
    )
    if cpus < _MIN_CPUS:
        note = (
            f"Warning: each rank gets only {cpus} of the {group.cpus} CPUs of a node in partition "
            f"{partition.name} (--cpus-per-task), so data workers compete with training."
        )
    return cpus, note


def _share(group: NodeGroup, partition: Partition, gpus_per_node: int, whole_nodes: bool) -> int:
    """Return the CPUs of a node that a job with this many of its GPUs may use."""
    cpus = group.cpus
    if not (whole_nodes or partition.whole_nodes):
        cpus = cpus * gpus_per_node // group.num_gpus
    return min(cpus, partition.max_cpus_per_node or cpus)
