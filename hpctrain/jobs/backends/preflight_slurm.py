"""Check a job against its Slurm site, and forecast its start and its maximum cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.jobs.backends.base import PreflightResult
from hpctrain.jobs.site.mounts import path_notes
from hpctrain.jobs.site.site_check import JobRequest, check_request, explain_refusal, waits_for_nodes
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.slurm.command import run_slurm
from hpctrain.slurm.duration import format_time_limit
from hpctrain.slurm.environment import strip_job_env
from hpctrain.slurm.job_array import JobArray
from hpctrain.slurm.job_test import JobTest, describe_start
from hpctrain.slurm.site_facts import Partition, Site
from hpctrain.text import join_or, pluralize


def preflight_slurm(
    spec: JobSpec, script: str, environ: Mapping[str, str], site: Site, gaps: Sequence[str] = ()
) -> PreflightResult:
    """Check a job against its site, and start `sbatch --test-only`, which changes nothing."""
    outer, request = strip_job_env(environ), JobRequest.from_spec(spec, environ)

    def ask(command: Sequence[str]) -> str:
        return run_slurm(command, outer)

    notes, partitions = check_request(request, site, ask)
    notes = [
        *(f"{gap}. Checks that require this information are skipped." for gap in gaps),
        *notes,
        *path_notes(spec, ask),
    ]
    cost = estimate_cost(request, partitions, site)
    # Slurm 22.05 also predicts starts in partitions that are down.
    if partitions and all(partition.state == "DOWN" for partition in partitions):
        names = join_or(partition.name for partition in partitions)
        notes.append(f"Partition {names} is down. The job will wait until the partition is up again.")
        return PreflightResult(tuple(notes), lambda: (cost,))
    test = JobTest(script, request.variables)

    def refusal() -> str:
        if "node configuration" in (error := test.refusal) and waits_for_nodes(request, partitions):
            return ""
        return error and explain_refusal(error, request, site)

    return PreflightResult(
        tuple(notes), lambda: (describe_start(request.directives, *test.answer), cost), refusal
    )


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
