"""Warning about time limits that are too short to start and train."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpctrain.jobs.options.option_value import DEFAULT_SOURCE, OptionValue
from hpctrain.slurm.duration import format_duration
from hpctrain.spec.job_spec import DEFAULT_STOP_BEFORE_LIMIT_S

if TYPE_CHECKING:
    from hpctrain.spec.job_spec import JobSpec

#: Seconds: ranks may take a minute to start; with less than this they may not reach a first checkpoint.
_LEAST_S = 300.0
#: Seconds by which Slurm may send its signal early.
_EARLY_S = 60.0


def check_time_left(settings: Mapping[str, OptionValue], spec: JobSpec) -> list[str]:
    """Return a warning if the ranks get the stop signal within five minutes of the job's start.

    Args:
        settings: all values and their sources.
        spec: the job.
    """
    if spec.time_limit_s is None:
        return []
    early_s = _EARLY_S if spec.backend == "slurm" else 0.0
    left_s = spec.time_limit_s - spec.stop_before_limit_s - early_s
    if left_s >= _LEAST_S:
        return []
    lead_s, origin = (
        DEFAULT_STOP_BEFORE_LIMIT_S,
        f"default: {DEFAULT_STOP_BEFORE_LIMIT_S}, or a third of --time",
    )
    if "stop_before_limit" in settings and settings["stop_before_limit"].source != DEFAULT_SOURCE:
        lead_s, origin = spec.stop_before_limit_s, str(settings["stop_before_limit"].source)
    better = format_duration(60 * math.ceil((_LEAST_S + lead_s + early_s) / 60))
    early = f" and {early_s:.0f} s because Slurm may signal early" if early_s else ""
    sentence = (
        f"Warning: the time limit of {spec.time_limit_s:g} s (--time, {settings['time'].source}), minus "
        f"{spec.stop_before_limit_s} s to save (--stop-before-limit, {origin}){early}, may leave only "
        f"{max(0.0, left_s):g} s to start and train. The run fails after three attempts without a new "
        f"checkpoint. Give --time {better} or more."
    )
    return [sentence]
