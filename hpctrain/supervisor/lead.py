"""How long before the time limit the ranks have to be told: as long as they have been seen to need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice, pairwise
from typing import Any

from hpctrain.jobs.tail import last_records
from hpctrain.rundir import RunDir

#: What a save may take longer than any that was measured: this much, and this many times. The ranks reckon
#: with the same, and begin none that does not fit.
_MARGIN_S, _MARGIN_FACTOR = 2.0, 1.25
#: The ranks agree on a step while the next one is computed, and finish that.
_STEPS = 3
#: A signal by way of Slurm arrives within this.
_SIGNAL_S = 10.0
#: The newest records that are looked at.
_STEPS_SEEN, _EVENTS_SEEN = 200, 1000


def needed_lead_s(step_s: float, save_s: float) -> float:
    """Seconds that ranks need to leave with their state saved.

    Args:
        step_s: the longest step, a validation between two of them included.
        save_s: the longest save, until it was committed.
    """
    return _SIGNAL_S + _STEPS * step_s + _MARGIN_FACTOR * save_s + _MARGIN_S


def lead_s(run: RunDir, asked_s: float, limit_s: float | None = None) -> float:
    """How long before the time limit to tell the ranks: what the user asked for, or more if they need it.

    Args:
        run: the run.
        asked_s: what the user asked for.
        limit_s: the time limit, half of which is for training, however long a save takes.
    """
    saves = [
        float(event["seconds"])
        for event in islice(last_records(run.events), _EVENTS_SEEN)
        if event.get("kind") == "checkpoint" and isinstance(event.get("seconds"), int | float)
    ]
    if not saves:
        return asked_s
    newest = list(islice(last_records(run.metrics), _STEPS_SEEN))[::-1]
    needed = needed_lead_s(longest_step_s(newest), max(saves))
    return max(asked_s, needed if limit_s is None else min(needed, limit_s / 2))


def longest_step_s(records: Iterable[Mapping[str, Any]]) -> float:
    """The longest step between two records that follow each other in one attempt; 0 where there are none."""
    longest = 0.0
    for before, after in pairwise(records):
        steps = int(after.get("step", 0)) - int(before.get("step", 0))
        if steps > 0 and before.get("attempt") == after.get("attempt"):
            longest = max(longest, (float(after["time"]) - float(before["time"])) / steps)
    return longest
