"""Judge a job with `sbatch --test-only`, and forecast its start and its maximum cost."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache

from hpctrain.errors import SchedulerError
from hpctrain.jobs.backends.base import PreflightResult
from hpctrain.jobs.site.mounts import path_notes
from hpctrain.jobs.site.site_check import JobRequest, check_request, explain_refusal, waits_for_nodes
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.slurm.command import SlurmCall, is_transient, run_slurm
from hpctrain.slurm.duration import format_time_limit
from hpctrain.slurm.environment import strip_job_env
from hpctrain.slurm.job_array import JobArray
from hpctrain.slurm.parsing import parse_timestamp
from hpctrain.slurm.site_facts import Partition, Site
from hpctrain.text import join_or, pluralize

#: Time limit in seconds: Slurm simulates the queue to predict a start. A long queue yields no forecast.
_FORECAST_TIMEOUT_S = 10.0
#: A start within this many seconds counts as immediate.
_IMMEDIATE_S = 60
#: Seconds: Slurm predicts later starts if running jobs have no time limit.
_MAX_START_S = 365 * 86400.0
_NOW = "now"

# Slurm 26.05 prints "a" after the time.
_START = re.compile(r"to start at (\S+)(?: a)? using \d+ processors on nodes (\S+)(?: in partition (\S+))?")
#: Messages of `sbatch --test-only` for jobs that sbatch accepts but that must wait.
_WAITS = (
    *("are busy", "Required node not available", "not available now", "dependency problem", "in held state"),
    *("reservation is in use", "not usable now", "maintenance reservation", "usage threshold"),
)


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
    # Only Slurm can tell the size of a batch script's job.
    cost = () if spec.program == "batch" else (estimate_cost(request, partitions, site),)
    # Slurm 22.05 also predicts starts in partitions that are down.
    if partitions and all(partition.state == "DOWN" for partition in partitions):
        names = join_or(partition.name for partition in partitions)
        notes.append(f"Partition {names} is down. The job will wait until the partition is up again.")
        return PreflightResult(tuple(notes), lambda: cost)
    test = SlurmCall(["sbatch", "--test-only"], request.variables, text=script, timeout_s=_FORECAST_TIMEOUT_S)

    @cache
    def judge() -> tuple[str, str]:
        """Return the output and the error of sbatch."""
        try:
            return "".join(test.answer()), ""
        except SchedulerError as error:
            return "", str(error)

    def refusal() -> str:
        _, error = judge()
        is_refused = error.startswith("sbatch failed: ") and not is_transient(error)
        if not is_refused or any(message in error for message in _WAITS):
            return ""
        if "node configuration" in error and waits_for_nodes(request, partitions):
            return ""
        return explain_refusal(error, request, site)

    return PreflightResult(tuple(notes), lambda: (expected_start(request, *judge()), *cost), refusal)


def expected_start(request: JobRequest, output: str, error: str = "") -> str:
    if error:
        return f"No estimated start: {error}."
    if (match := _START.search(output)) is None:
        return f"No estimated start: {' '.join(output.split()) or 'sbatch printed nothing'}."
    time, nodes, partition = match.groups()
    start = parse_timestamp(time)
    if start is not None and start - datetime.now().timestamp() > _MAX_START_S:
        return "No estimated start: according to Slurm, the job waits for jobs without a time limit."
    if request.is_given("hold"):
        return "The job is held (--hold) and will start only after `scontrol release`."
    # The forecast ignores dependencies (seen with Slurm 22.05).
    start_text = _when(time)
    if request.is_given("dependency"):
        condition = "its dependency is satisfied (--dependency)"
        start_text = f"when {condition}" if start_text == _NOW else f"{start_text}, after {condition}"
    return f"Estimated start: {start_text}, on {nodes}{f', partition {partition}' if partition else ''}."


def _when(time: str) -> str:
    if (seconds := parse_timestamp(time)) is None:
        return time
    start, today = datetime.fromtimestamp(seconds), datetime.now()
    if (start - today).total_seconds() < _IMMEDIATE_S:
        return _NOW
    return f"{start:%H:%M}" if start.date() == today.date() else f"{start:%Y-%m-%d %H:%M}"


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
        if request.is_given("time")
        else [partition.time_without_option_s for partition in partitions]
    )
    if not limits or None in limits:
        name = " " + join_or(partition.name for partition in partitions) if partitions else ""
        return f"No cost estimate ({size}): neither --time nor partition{name} sets a time limit."
    limit_s = max(limit for limit in limits if limit is not None)
    hours = num_tasks * spec.most_granted * amount * limit_s / 3600
    cost = pluralize(round(hours, 2) if hours < 100 else round(hours), f"{unit}-hour")
    return f"Maximum cost: {cost} ({size} × {format_time_limit(limit_s)}) per allocation."
