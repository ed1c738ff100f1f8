"""Summary of an ended run as a `RunOutcome`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from hpctrain.rundir import RunDir, is_new_submission
from hpctrain.telemetry.accounting.time_spans import TimeCategory, TimeSpan
from hpctrain.telemetry.hparams import merge_hparams
from hpctrain.telemetry.report.run_data import RunContext, RunData, read_run_data
from hpctrain.telemetry.run_outcome import RunOutcome, kind_of

#: Larger records take seconds to read; such a run has no outcome.
_MAX_BYTES = 50_000_000
#: Time that is neither training nor caused by it.
_NOT_TRAINING = frozenset(
    {
        TimeCategory.LOADING,
        TimeCategory.STARTING,
        TimeCategory.RESTARTING,
        TimeCategory.LOST,
        TimeCategory.QUEUED,
        TimeCategory.IDLE,
    }
)
#: Events after which an interrupted run keeps its allocation.
_KEEPS_NODES = frozenset({"restart", "shrink", "replace"})


def write_outcome(run: RunDir) -> None:
    """Write the outcome of an ended run, unless its records are very large or damaged."""
    with suppress(OSError, ValueError):
        if sum(path.stat().st_size for path in (run.events, run.metrics) if path.exists()) > _MAX_BYTES:
            return
        outcome = summarize_run(read_run_data(run, RunContext(), now=run.events.stat().st_mtime))
        if outcome is not None:
            run.write(run.outcome, json.dumps(asdict(outcome)))


def summarize_run(run_data: RunData) -> RunOutcome | None:
    """Return the outcome of a run; None if it has not started, has not ended, or was submitted again."""
    submissions = [event for event in run_data.events if is_new_submission(event)]
    if len(submissions) != 1 or not run_data.attempts or run_data.state in ("PENDING", "RUNNING", "UNKNOWN"):
        return None
    totals, attempts, spec = run_data.breakdown.totals_us, run_data.attempts, run_data.spec
    first, nodes = attempts[0], max((one.nodes or 1 for one in attempts), default=1)
    train_s = sum(us for category, us in totals.items() if category not in _NOT_TRAINING) / 1e6
    spans = run_data.breakdown.spans
    starting = (TimeCategory.STARTING, TimeCategory.LOADING)
    saves = len({one.step for one in run_data.checkpoints})
    interrupted = [one for one in run_data.interruptions if one.followed_by]
    directives = spec.get("directives")
    return RunOutcome(
        run_id=run_data.run_id,
        kind=kind_of(spec),
        hparams=merge_hparams({"args": spec.get("args")}, {}),
        state=run_data.state,
        submitted=float(submissions[0]["time"]),
        started=first.started,
        ended=run_data.end,
        nodes=nodes,
        gpus=nodes * int(spec.get("gpus_per_node") or 0),
        steps=run_data.step,
        train_s=train_s,
        start_s=_seconds(spans, starting, first.number),
        close_s=_seconds(spans, (TimeCategory.IDLE,), attempts[-1].number),
        allocated_s=(run_data.breakdown.wall_us - totals[TimeCategory.QUEUED]) / 1e6,
        failures=sum(one.end != "stop" for one in interrupted),
        stops=sum(one.end == "stop" for one in interrupted),
        restart_s=_mean([one.away_us / 1e6 for one in interrupted if one.followed_by in _KEEPS_NODES]),
        requeue_s=_mean([one.away_us / 1e6 for one in interrupted if one.followed_by not in _KEEPS_NODES]),
        save_every_s=train_s / saves if saves else None,
        ettr=run_data.goodput.ettr,
        kwh=None if run_data.energy is None else run_data.energy.total_kwh,
        partition=str(directives.get("partition") or "") if isinstance(directives, dict) else "",
        time_limit_s=spec.get("time_limit_s"),
        forecast=submissions[0].get("forecast"),
    )


def _seconds(spans: Sequence[TimeSpan], categories: Sequence[TimeCategory], attempt: int) -> float:
    found = (one for one in spans if one.category in categories and one.attempt == attempt)
    return sum(one.end_us - one.start_us for one in found) / 1e6


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
