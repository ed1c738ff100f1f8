"""Lead of the stop signal before the time limit, based on measured step and save times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice, pairwise
from typing import Any

from hpctrain.checkpoint.interval import longest_save_s
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import RunDir, is_event, is_metrics

#: The ranks agree on a step while they compute the next step, and complete the latter.
_STEPS = 3
#: Delay of a signal sent through Slurm.
_SIGNAL_S = 10.0
#: Number of newest records to read.
_STEPS_SEEN, _EVENTS_SEEN = 200, 1000


def minimum_lead_s(step_s: float, save_s: float) -> float:
    """Return the seconds that ranks need to save their state and exit.

    Args:
        step_s: the longest step, including a validation between two steps.
        save_s: the longest save, including the commit.
    """
    return _SIGNAL_S + _STEPS * step_s + longest_save_s(save_s)


def required_lead_s(run: RunDir, asked_s: float, limit_s: float | None = None) -> float:
    """Return the lead before the time limit: the user's value, or more if the ranks need it.

    Args:
        run: the run.
        asked_s: the user's value, in seconds.
        limit_s: the time limit; half of it is reserved for training, regardless of the save time.
    """
    saves = [
        float(event["seconds"])
        for event in islice(read_last_records(run.events, is_event), _EVENTS_SEEN)
        if event.get("kind") == "checkpoint" and isinstance(event.get("seconds"), int | float)
    ]
    if not saves:
        return asked_s
    newest = list(islice(read_last_records(run.metrics, is_metrics), _STEPS_SEEN))[::-1]
    needed = minimum_lead_s(longest_step_s(newest), max(saves))
    return max(asked_s, needed if limit_s is None else min(needed, limit_s / 2))


def longest_step_s(records: Iterable[Mapping[str, Any]]) -> float:
    """Return the longest step between consecutive records of an attempt; 0 without records."""
    longest = 0.0
    for before, after in pairwise(record for record in records if "time" in record):
        steps = int(after.get("step", 0)) - int(before.get("step", 0))
        if steps > 0 and before.get("attempt") == after.get("attempt"):
            longest = max(longest, (float(after["time"]) - float(before["time"])) / steps)
    return longest
