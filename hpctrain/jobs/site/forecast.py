"""Forecast of a job: its expected start and its maximum cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from hpctrain.errors import SchedulerError
from hpctrain.jobs.site.job_request import JobRequest
from hpctrain.slurm.command import SlurmCall, is_transient
from hpctrain.slurm.duration import format_time_limit
from hpctrain.slurm.job_array import JobArray
from hpctrain.slurm.parsing import parse_timestamp
from hpctrain.slurm.pending_reasons import suggest_remedy
from hpctrain.slurm.site_facts import Partition, Site
from hpctrain.text import join_or, pluralize

#: Time limit in seconds: Slurm simulates the queue to predict a start. A long queue yields no forecast.
FORECAST_TIMEOUT_S = 10.0
#: A start within this many seconds counts as immediate.
_IMMEDIATE_S = 60
#: Seconds: Slurm predicts later starts if running jobs have no time limit.
_MAX_START_S = 365 * 86400.0
_NOW = "now"

# Slurm 26.05 prints "a" after the time.
_START = re.compile(r"to start at (\S+)(?: a)? using \d+ processors on nodes (\S+)(?: in partition (\S+))?")


def can_start(partitions: Sequence[Partition]) -> bool:
    """Return true if a job can start in one of the partitions.

    Slurm 22.05 also predicts starts in partitions that are down.

    Args:
        partitions: partitions in which the job may run; empty if unknown.
    """
    return not partitions or any(partition.state == "UP" for partition in partitions)


#: Messages of `sbatch --test-only` for jobs that sbatch accepts but that must wait.
_WAITS = ("are busy", "Required node not available", "not available now", "dependency problem")


class StartForecast:
    """Cached answer of `sbatch --test-only`."""

    def __init__(self, call: SlurmCall) -> None:
        self._call: SlurmCall | None = call
        self._answer: tuple[str, str] | SchedulerError = ("", "")

    def answer(self) -> tuple[str, str]:
        """Return the answer, waiting for it on the first call. See `SlurmCall.answer`."""
        if self._call is not None:
            try:
                self._answer = self._call.answer()
            except SchedulerError as error:
                self._answer = error.with_traceback(None)
            self._call = None
        if isinstance(self._answer, SchedulerError):
            raise self._answer
        return self._answer

    def refusal(self) -> str:
        """Return Slurm's message and the remedy if Slurm would reject the job; empty if not, or unknown."""
        try:
            self.answer()
        except SchedulerError as error:
            words = str(error)
            if words.startswith("sbatch failed: ") and not is_transient(words):
                waits = any(wait in words for wait in _WAITS)
                return "" if waits else f"{words}. {suggest_remedy(words)}"
        return ""


def expected_start(request: JobRequest, forecast: SlurmCall | StartForecast) -> str:
    """Return a sentence on the expected start of the job.

    Args:
        request: what the job requests.
        forecast: `sbatch --test-only` of its script.
    """
    try:
        words = "".join(forecast.answer())
    except SchedulerError as error:
        return f"No estimated start: {error}."
    if (match := _START.search(words)) is None:
        return f"No estimated start: {' '.join(words.split()) or 'sbatch printed nothing'}."
    time, nodes, partition = match.groups()
    if (start := parse_timestamp(time)) is not None and _is_too_late(start):
        return "No estimated start: according to Slurm, the job waits for jobs without a time limit."
    where = f"on {nodes}" + (f", partition {partition}" if partition else "")
    # The forecast ignores dependencies (seen with Slurm 22.05).
    when = _when(time)
    if request.is_given("dependency"):
        allowed = "its dependency is satisfied (--dependency)"
        when = f"when {allowed}" if when == _NOW else f"{when}, after {allowed}"
    if request.is_given("hold"):
        return "The job is held (--hold) and will start only after `scontrol release`."
    return f"Estimated start: {when}, {where}."


def estimate_cost(request: JobRequest, partitions: Sequence[Partition], site: Site) -> str:
    """Return a sentence on the maximum cost of the job for each start."""
    spec = request.spec
    tasks = len(JobArray.parse(word).indices) if (word := request.value("array")) else 1
    gpus, cpus = spec.gpus_per_node, request.cpus_per_node
    groups = [group for partition in partitions for group in partition.groups if group.num_gpus >= gpus]
    if groups and _gets_whole_nodes(request, partitions, site):
        gpus = max(group.num_gpus for group in groups) if gpus else 0
        cpus = max(group.cpus for group in groups)
    each, unit = (gpus, "GPU") if gpus else (cpus, "CPU")
    size = f"{pluralize(spec.nodes, 'node')} × {pluralize(each, unit)}"
    if tasks > 1:
        size = f"{tasks} tasks × {size}"
    limits = (
        [request.time_limit_s]
        if request.is_given("time")
        else [one.time_without_option_s for one in partitions]
    )
    if not limits or None in limits:
        names = f"partition {join_or(one.name for one in partitions)}" if partitions else "the partition"
        return f"No cost estimate ({size}): neither --time nor {names} sets a time limit."
    limit_s = max(limit for limit in limits if limit is not None)
    hours = tasks * spec.most_granted * each * limit_s / 3600
    amount = pluralize(round(hours, 2) if hours < 100 else round(hours), f"{unit}-hour")
    return f"Maximum cost: {amount} ({size} × {format_time_limit(limit_s)}) per allocation."


def _gets_whole_nodes(request: JobRequest, partitions: Sequence[Partition], site: Site) -> bool:
    is_linear = site.slurm is not None and site.slurm.select == "linear"
    return request.whole_nodes or is_linear or any(partition.whole_nodes for partition in partitions)


def _is_too_late(start: float) -> bool:
    return start - datetime.now().timestamp() > _MAX_START_S


def _when(time: str) -> str:
    if (seconds := parse_timestamp(time)) is None:
        return time
    start, now = datetime.fromtimestamp(seconds), datetime.now()
    if (start - now).total_seconds() < _IMMEDIATE_S:
        return _NOW
    same_day = start.date() == now.date()
    return f"{start:%H:%M}" if same_day else f"{start:%Y-%m-%d %H:%M}"
