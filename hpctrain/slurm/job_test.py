"""Ask `sbatch --test-only` whether Slurm would accept a job, and when it would start; nothing is changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property

from hpctrain.errors import SchedulerError
from hpctrain.slurm.command import SlurmCall, is_transient
from hpctrain.slurm.parsing import parse_timestamp

#: Time limit in seconds: Slurm simulates the queue to predict a start. A long queue yields no forecast.
_TIMEOUT_S = 10.0
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


class JobTest:
    """A test of a batch script, which runs until its result is needed."""

    def __init__(self, script: str, environ: Mapping[str, str]) -> None:
        self._call = SlurmCall(["sbatch", "--test-only"], environ, text=script, timeout_s=_TIMEOUT_S)

    @cached_property
    def answer(self) -> tuple[str, str]:
        """The output and the error of sbatch."""
        try:
            return "".join(self._call.answer()), ""
        except SchedulerError as error:
            return "", str(error)

    @property
    def refusal(self) -> str:
        """The reason of a rejection; empty if there is none, or no answer."""
        _, error = self.answer
        is_refused = error.startswith("sbatch failed: ") and not is_transient(error)
        return error if is_refused and not any(message in error for message in _WAITS) else ""


def describe_start(directives: Mapping[str, str], output: str, error: str = "") -> str:
    """Describe the expected start of a job with these options, from the answer of its test."""
    if error:
        return f"No estimated start: {error}."
    if (match := _START.search(output)) is None:
        return f"No estimated start: {' '.join(output.split()) or 'sbatch printed nothing'}."
    time, nodes, partition = match.groups()
    start = parse_timestamp(time)
    if start is not None and start - datetime.now().timestamp() > _MAX_START_S:
        return "No estimated start: according to Slurm, the job waits for jobs without a time limit."
    if "hold" in directives:
        return "The job is held (--hold) and will start only after `scontrol release`."
    # The forecast ignores dependencies (seen with Slurm 22.05).
    start_text = _when(time)
    if "dependency" in directives:
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
