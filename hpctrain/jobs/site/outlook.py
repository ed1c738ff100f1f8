"""What awaits a job: when Slurm expects to start it, and what it may cost at the most."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from hpctrain.errors import SchedulerError
from hpctrain.jobs.array import Array
from hpctrain.jobs.site.facts import Partition, Site
from hpctrain.jobs.site.problem import duration, plural
from hpctrain.jobs.site.request import Request
from hpctrain.jobs.slurm_command import Question, may_succeed_later

#: Slurm walks through its queue to foretell a start. Whoever has a long queue has to do without.
FORETELL_LIMIT_S = 10.0
#: A start within this many seconds is "at once".
_AT_ONCE_S = 60
_NOW = "at once"

_START = re.compile(r"to start at (\S+) using \d+ processors on nodes (\S+)(?: in partition (\S+))?")


def can_start(partitions: Sequence[Partition]) -> bool:
    """Whether a job can start in one of them; Slurm 22.05 foretells it of those that are down, too.

    Args:
        partitions: those in which it may run; none where that is not known.
    """
    return not partitions or any(partition.state == "UP" for partition in partitions)


#: What `sbatch --test-only` says of jobs that sbatch takes, and that wait.
_WAITS = ("are busy", "Required node not available", "not available now", "dependency problem")


class Forecast:
    """What `sbatch --test-only` says; it may be looked at again and again."""

    def __init__(self, question: Question) -> None:
        self._question: Question | None = question
        self._said: tuple[str, str] | SchedulerError = ("", "")

    def answer(self) -> tuple[str, str]:
        """See `Question.answer`."""
        if self._question is not None:
            try:
                self._said = self._question.answer()
            except SchedulerError as error:
                self._said = error.with_traceback(None)
            self._question = None
        if isinstance(self._said, SchedulerError):
            raise self._said
        return self._said

    def refusal(self) -> str:
        """Why Slurm would not take the job, in its words; empty where it would, or does not say."""
        try:
            self.answer()
        except SchedulerError as error:
            words = str(error)
            if words.startswith("sbatch says: ") and not may_succeed_later(words):
                return "" if any(wait in words for wait in _WAITS) else words
        return ""


def expected_start(request: Request, forecast: Question | Forecast) -> str:
    """When Slurm expects the job to start, in a sentence.

    Args:
        request: what the job asks for.
        forecast: `sbatch --test-only` of its script.
    """
    try:
        words = "".join(forecast.answer())
    except SchedulerError as error:
        return f"Slurm foretells no start: {error}."
    if (match := _START.search(words)) is None:
        return f"Slurm foretells no start: {' '.join(words.split()) or 'it says nothing'}."
    time, nodes, partition = match.groups()
    where = f"on {nodes}" + (f", partition {partition}" if partition else "")
    # What a job depends on is not part of the forecast (seen with Slurm 22.05).
    when = _when(time)
    if request.gives("dependency"):
        allowed = "what it depends on allows it (--dependency)"
        when = f"as soon as {allowed}" if when == _NOW else f"{when}, once {allowed}"
    if request.gives("hold"):
        return "The job is held (--hold): it starts after `scontrol release`."
    return f"Slurm expects to start it {when}, {where}."


def highest_cost(request: Request, partitions: Sequence[Partition], site: Site) -> str:
    """What the job may cost at the most each time it is started, in a sentence."""
    spec = request.spec
    tasks = len(Array.parse(word).indices) if (word := request.word("array")) else 1
    gpus, cpus = spec.gpus_per_node, request.cpus_per_node
    groups = [group for partition in partitions for group in partition.groups if group.num_gpus >= gpus]
    if groups and _gets_whole_nodes(request, partitions, site):
        gpus = max(group.num_gpus for group in groups) if gpus else 0
        cpus = max(group.cpus for group in groups)
    each, unit = (gpus, "GPU") if gpus else (cpus, "CPU")
    size = f"{plural(spec.nodes, 'node')} × {plural(each, unit)}"
    if tasks > 1:
        size = f"{tasks} tasks × {size}"
    limits = (
        [request.time_limit_s] if request.gives("time") else [one.time_without_option_s for one in partitions]
    )
    if not limits or None in limits:
        names = " or ".join(partition.name for partition in partitions) or "its partition"
        return f"Nothing is known to bound its cost ({size}): neither --time nor {names} sets a limit."
    limit_s = max(limit for limit in limits if limit is not None)
    hours = tasks * spec.most_granted * each * limit_s / 3600
    return (
        f"It may cost up to {_amount(hours)} {unit}-hours ({size} × {duration(limit_s)}), and as much again "
        "after each requeue."
    )


def _gets_whole_nodes(request: Request, partitions: Sequence[Partition], site: Site) -> bool:
    is_linear = site.slurm is not None and site.slurm.select == "linear"
    return request.whole_nodes or is_linear or any(partition.whole_nodes for partition in partitions)


def _when(time: str) -> str:
    try:
        start = datetime.fromisoformat(time)
    except ValueError:
        return f"at {time}"
    now = datetime.now()
    if (start - now).total_seconds() < _AT_ONCE_S:
        return _NOW
    same_day = start.date() == now.date()
    return f"at {start:%H:%M}" if same_day else f"on {start:%Y-%m-%d} at {start:%H:%M}"


def _amount(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}" if hours < 10 else f"{hours:.3g}"
