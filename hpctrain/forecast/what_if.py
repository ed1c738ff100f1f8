"""Time that a run would have saved by a change, computed from its time breakdown."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpctrain.checkpoint.interval import NODE_MTBF_S, InterruptionHistory, checkpoint_interval_s
from hpctrain.forecast.run_forecast import RestartConditions
from hpctrain.slurm.parsing import parse_time_limit
from hpctrain.telemetry.accounting.time_spans import TimeCategory
from hpctrain.telemetry.report.advice import STEP_CATEGORIES, more_workers, steps_us
from hpctrain.telemetry.report.next_request import next_request
from hpctrain.telemetry.report.run_data import RunData, WhatIf
from hpctrain.telemetry.report.straggler_text import describe_rank
from hpctrain.telemetry.run_outcome import RunOutcome
from hpctrain.telemetry.summarize_run import summarize_run
from hpctrain.text import format_duration, is_finite

#: Changes that save a smaller fraction of the time are omitted.
_MIN_SAVING = 0.01
#: Number of simulated runs.
_NUM_RUNS = 50
#: Minimum number of runs to compare waits.
_MIN_WAITS = 3
#: Times per step in a `straggler` event.
_PARTS = ("data", "compute", "exchange")


def what_if(run_data: RunData, outcomes: Sequence[RunOutcome] = ()) -> list[WhatIf]:
    """Return changes with the time that each would have saved, largest first.

    The savings do not add up. docs/goodput.md has the formulas.

    Args:
        run_data: the run.
        outcomes: outcomes of the other runs of the user, which show the waits of smaller requests.
    """
    if not run_data.breakdown.knows_lost_work:
        return []
    found = [
        *_without_stragglers(run_data),
        *_other_interval(run_data),
        *_more_workers(run_data),
        *_spare_node(run_data),
        *_smaller_request(run_data, outcomes),
    ]
    least_us = _MIN_SAVING * run_data.breakdown.wall_us
    return sorted((one for one in found if one.saved_us > least_us), key=lambda one: -one.saved_us)


def _without_stragglers(run_data: RunData) -> Iterator[WhatIf]:
    """Compare the steps of slow ranks with those of typical ranks, from their first to their last report."""
    reports: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for event in run_data.events:
        if event.get("kind") == "straggler" and is_finite(event.get("time")):
            reports[str(event.get("attempt")), describe_rank(event)].append(event)
    saved_us: dict[str, tuple[float, str]] = {}
    for (attempt, rank), events in reports.items():
        part = statistics.fmean(map(_slow_part, events))
        first_us, last_us = events[0]["time"] * 1e6, events[-1]["time"] * 1e6
        overlaps = (
            max(0.0, min(span.end_us, last_us) - max(span.start_us, first_us))
            for span in run_data.breakdown.spans
            if span.category in STEP_CATEGORIES
        )
        # If several ranks of an attempt are slow, the others wait for the slowest.
        saved_us[attempt] = max(saved_us.get(attempt, (0.0, "")), (part * sum(overlaps), rank))
    if saved_us:
        ranks = ", ".join(dict.fromkeys(rank for _, rank in saved_us.values()))
        yield WhatIf(f"without stragglers ({ranks})", round(sum(us for us, _ in saved_us.values())))


def _slow_part(event: Mapping[str, Any]) -> float:
    """Return the fraction of a step for which the other ranks wait for a slow rank."""
    own, typical = _own_times(event.get("seconds")), _own_times(event.get("typical"))
    if own is None or typical is None or not sum(own):
        return 0.0
    return max(0.0, own[0] - typical[0]) / sum(own)


def _own_times(times: object) -> tuple[float, float] | None:
    """Return the seconds per step without and in the exchange; None if the record is damaged."""
    if not isinstance(times, Mapping) or not all(is_finite(times.get(name)) for name in _PARTS):
        return None
    return times["data"] + times["compute"], times["exchange"]


def _other_interval(run_data: RunData) -> Iterator[WhatIf]:
    """Compare the expected costs of the mean and of the optimal checkpoint interval."""
    count, train_s = len({its.step for its in run_data.checkpoints}), steps_us(run_data) / 1e6
    stall_s = run_data.breakdown.totals_us[TimeCategory.SAVING] / 1e6 / max(1, count)
    nodes = next((attempt.nodes for attempt in reversed(run_data.attempts) if attempt.nodes), 1)
    if count < 2 or not stall_s or not train_s:
        return
    intact = (its for its in run_data.events if is_finite(its.get("time")) and is_finite(its.get("nodes", 1)))
    history = InterruptionHistory.from_events(intact)
    mtbf_s = history.node_mtbf_s(NODE_MTBF_S) / nodes
    write_s = max((its.seconds or 0.0 for its in run_data.checkpoints), default=0.0)
    # Both are times of training between two saves.
    now_s, best_s = train_s / count, checkpoint_interval_s(stall_s, write_s, mtbf_s) - stall_s

    def cost_s(interval_s: float) -> float:
        return train_s * (stall_s / interval_s + interval_s / (2 * mtbf_s))

    every = f"checkpoints every {format_duration(best_s)} instead of {format_duration(now_s)}"
    yield WhatIf(every, round(1e6 * (cost_s(now_s) - cost_s(best_s))))


def _spare_node(run_data: RunData) -> Iterator[WhatIf]:
    """Compare simulated runs with the failure rate of this run, with and without another spare node."""
    own = summarize_run(run_data)
    if own is None or not own.failures or run_data.spec.get("backend") != "slurm":
        return
    conditions = RestartConditions.from_outcomes({**run_data.spec, "nodes": own.nodes}, [own])
    pairs = [
        [conditions.simulate(own.train_s, own.start_s, seed, more_spares=spares) for spares in (0, 1)]
        for seed in range(_NUM_RUNS)
    ]
    saved_s = [without - with_spare for without, with_spare in pairs if without and with_spare]
    if saved_s:
        yield WhatIf("with one more spare node", round(1e6 * statistics.median(saved_s)))


def _smaller_request(run_data: RunData, outcomes: Sequence[RunOutcome]) -> Iterator[WhatIf]:
    """Compare the wait with that of runs of this size with the time limit for next time."""
    own, later = summarize_run(run_data), [one for one in next_request(run_data) if one.option == "--time"]
    if own is None or not later or (limit_s := parse_time_limit(later[0].next)) is None:
        return
    waits = [
        one.wait_s
        for one in outcomes
        if (one.partition, one.nodes) == (own.partition, own.nodes)
        and one.kind[0] == own.kind[0]
        and one.time_limit_s is not None
        and one.time_limit_s <= limit_s
    ]
    if len(waits) >= _MIN_WAITS:
        change = (
            f"--time={later[0].next} instead of {later[0].requested} (median wait of {len(waits)} such runs)"
        )
        yield WhatIf(change, round(1e6 * (own.wait_s - statistics.median(waits))))


def _more_workers(run_data: RunData) -> Iterator[WhatIf]:
    """Compare the time of steps whose batches come from more data workers, if the CPUs suffice."""
    if (counts := more_workers(run_data)) is None:
        return
    workers, more = counts
    totals = run_data.breakdown.totals_us
    waiting_us = totals[TimeCategory.DATA]
    busy_us = steps_us(run_data) - waiting_us
    # Without workers, a rank loads each batch between two steps.
    loading_us = (busy_us + waiting_us) * workers if workers else waiting_us
    left_us = max(0.0, loading_us / more - busy_us)
    yield WhatIf(f"{more} data workers per rank instead of {workers}", round(waiting_us - left_us))
