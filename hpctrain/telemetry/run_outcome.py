"""The outcome of an ended run, from which later runs of the same kind are predicted."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.files import read_json
from hpctrain.rundir import RunDir
from hpctrain.telemetry.accounting.time_spans import TimeCategory, TimeSpan
from hpctrain.telemetry.accounting.timeline_events import is_finite
from hpctrain.telemetry.hparams import HparamValue, merge_hparams

if TYPE_CHECKING:
    from hpctrain.telemetry.report.run_data import RunData

#: Larger records take seconds to read; such a run has no outcome.
_MAX_BYTES = 50_000_000
#: Maximum number of folders to search for outcomes.
_MAX_FOLDERS = 1000
#: Fields of a specification that runs of the same kind share.
_KIND = ("backend", "program", "script", "nodes", "ntasks_per_node", "gpus_per_node", "gpu_type")
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
#: Fields of an outcome that are numbers, and those that may be missing.
_NUMBERS = (
    *("submitted", "started", "ended", "nodes", "gpus", "failures", "stops"),
    *("train_s", "start_s", "close_s", "allocated_s"),
)
_OPTIONAL_NUMBERS = ("steps", "restart_s", "requeue_s", "save_every_s", "ettr", "kwh", "time_limit_s")
#: Events after which an interrupted run keeps its allocation.
_KEEPS_NODES = frozenset({"restart", "shrink", "replace"})


@dataclass(frozen=True)
class RunOutcome:
    """Times and interruptions of an ended run. Times are seconds, or seconds since the epoch."""

    run_id: str
    kind: list[Any]
    """Values of the fields `_KIND` of the specification."""
    hparams: dict[str, HparamValue]
    """The script's arguments."""
    state: str
    submitted: float
    started: float
    """Start of the first attempt."""
    ended: float
    nodes: int
    gpus: int
    """GPUs of all nodes; CPU ranks do not count."""
    steps: int | None
    """None if the script does not report its steps."""
    train_s: float
    """Time spent on steps that were not repeated, including validation and saves."""
    start_s: float
    """From the start of the first attempt to its first step."""
    close_s: float
    """From the last step to the end."""
    allocated_s: float
    """Total time in allocations."""
    failures: int
    """Interruptions that lost work."""
    stops: int
    """Interruptions after a save, such as preemptions."""
    restart_s: float | None
    """Mean time from a failure to the next step in the same allocation."""
    requeue_s: float | None
    """Mean time from an interruption to the next step in another allocation."""
    save_every_s: float | None
    """Mean training time between two saves."""
    ettr: float | None
    kwh: float | None = None
    """Measured energy."""
    partition: str = ""
    time_limit_s: float | None = None
    forecast: dict[str, Any] | None = None
    """The prediction at the submission."""

    @property
    def wait_s(self) -> float:
        return max(0.0, self.started - self.submitted)


def kind_of(spec: Mapping[str, Any]) -> list[Any]:
    """Return the values that runs of the same kind share."""
    return [spec.get(name) for name in _KIND]


def write_outcome(run: RunDir) -> None:
    """Write the outcome of an ended run, unless its records are very large or damaged."""
    from hpctrain.telemetry.report.run_data import RunContext, read_run_data

    with suppress(OSError, ValueError):
        if sum(path.stat().st_size for path in (run.events, run.metrics) if path.exists()) > _MAX_BYTES:
            return
        outcome = summarize_run(read_run_data(run, RunContext(), now=run.events.stat().st_mtime))
        if outcome is not None:
            run.write(run.outcome, json.dumps(asdict(outcome)))


def summarize_run(run_data: RunData) -> RunOutcome | None:
    """Return the outcome of a run; None if it has not started, has not ended, or was submitted again."""
    submissions = [one for one in run_data.events if one.get("kind") == "submitted" and not one.get("after")]
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


def _is_valid(record: Mapping[str, Any]) -> bool:
    """True if the values of a record have the types that its readers require."""
    return (
        all(is_finite(record.get(name)) for name in _NUMBERS)
        and all(record.get(name) is None or is_finite(record[name]) for name in _OPTIONAL_NUMBERS)
        and isinstance(record.get("kind"), list)
        and isinstance(record.get("hparams"), dict)
    )


def read_outcomes(runs_dir: Path, kind: list[Any] | None = None) -> list[RunOutcome]:
    """Return the outcomes of the runs in a folder, oldest first.

    Args:
        runs_dir: the folder of the runs.
        kind: return only runs of this kind (`kind_of`).
    """
    try:
        # Names end with the time of submission: prefer the newest.
        names = sorted(os.listdir(runs_dir), reverse=True)[:_MAX_FOLDERS]
    except OSError:
        return []
    known = {entry.name for entry in fields(RunOutcome)}
    found = []
    for name in names:
        with suppress(OSError, ValueError, TypeError):
            record = read_json(RunDir(runs_dir / name).outcome)
            if (kind is None or record.get("kind") == kind) and _is_valid(record):
                found.append(RunOutcome(**{key: its for key, its in record.items() if key in known}))
    return sorted(found, key=lambda one: one.ended)
