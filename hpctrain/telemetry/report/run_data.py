"""Read the data of a run for a report. Any file of the run may be missing or damaged."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.rundir import STOPPED_EARLY, RunDir, is_event
from hpctrain.spec.redaction import redact_environment, redact_spec
from hpctrain.telemetry.accounting.goodput import Goodput, compute_goodput
from hpctrain.telemetry.accounting.metric_fields import reports_steps
from hpctrain.telemetry.accounting.time_breakdown import TimeBreakdown
from hpctrain.telemetry.accounting.timeline_events import TimeCategory
from hpctrain.telemetry.hparams import HparamValue, ignored_hparams, merge_hparams
from hpctrain.telemetry.report.artifacts import (
    CheckpointRecord,
    CodeVersion,
    read_checkpoints,
    read_codes,
    read_environment,
    read_spec,
)
from hpctrain.telemetry.report.attempts import VANISHED_CAUSE, Attempt, mark_cancelled, read_attempts
from hpctrain.telemetry.report.device_metrics import COLUMNS, DeviceMetrics, read_device_metrics
from hpctrain.telemetry.report.jsonl import gc_disabled, read_jsonl
from hpctrain.telemetry.report.metric_curves import CurvePoint, MetricCurves, step_rates
from hpctrain.telemetry.report.run_results import BestValue, find_best, read_ranking

_J_PER_KWH = 3.6e6
_ACTIVE_STATES = ("PENDING", "RUNNING")


@dataclass(frozen=True)
class RunContext:
    """Facts about a run that its folder does not contain."""

    name: str | None = None
    """COMPLETED, FAILED, CANCELLED, RUNNING, PENDING or UNKNOWN; None infers the state from the folder."""
    words: str = ""
    cause: str | None = None
    resubmit_command: Sequence[str] = ()
    """The command that reproduces the run."""


@dataclass(frozen=True)
class EnergyUse:
    """Measured energy of the nodes of a run, in kWh."""

    total_kwh: float
    lost_kwh: float
    """Energy for steps that were repeated later."""
    per_sample_kwh: float | None
    """None if the batch size is unknown."""


@dataclass
class RunData:
    """All data of a run."""

    run_id: str
    folder: str
    state: str
    words: str
    cause: str | None
    now: float
    events: list[dict[str, Any]]
    spec: dict[str, Any]
    breakdown: TimeBreakdown
    goodput: Goodput
    curves: MetricCurves
    attempts: list[Attempt]
    checkpoints: list[CheckpointRecord]
    rates: list[CurvePoint]
    codes: list[CodeVersion]
    devices: DeviceMetrics
    energy: EnergyUse | None
    environment: dict[str, Any]
    """Environment of the newest attempt, and the settings of its training."""
    hparams: dict[str, HparamValue]
    best: BestValue | None
    """Best value of the metric that the user optimizes."""
    resubmit_command: list[str]
    """The command that reproduces the run, and comments on its values that did not apply."""
    reports_steps: bool | None
    """True if the script reports its steps; None if unknown."""
    notes: list[str] = field(default_factory=list)

    @property
    def start(self) -> float:
        """Time of the first record, in seconds since the epoch; the current time without records."""
        return self.breakdown.spans[0].start_us / 1e6 if self.breakdown.spans else self.now

    @property
    def end(self) -> float:
        """Time of the last record."""
        return self.breakdown.spans[-1].end_us / 1e6 if self.breakdown.spans else self.now

    @property
    def is_going(self) -> bool:
        return self.state in _ACTIVE_STATES

    @property
    def step(self) -> int | None:
        """The last logged step."""
        return max(self.curves.effective, default=None)

    @property
    def steps_per_s(self) -> float | None:
        """Median of the logged rates."""
        known = [rate for _, rate in self.rates if rate is not None]
        return statistics.median(known) if known else None

    @property
    def interruptions(self) -> list[Attempt]:
        """Attempts that ended before the run."""
        return [attempt for attempt in self.attempts if attempt.interrupted]


@gc_disabled()
def read_run_data(run: RunDir, state: RunContext, *, now: float) -> RunData:
    """Read the folder of a run, which may have been started without a submission."""
    events, metrics = read_jsonl(run.events, is_event), read_jsonl(run.metrics)
    name = state.name or _recorded_state(run, events)
    curves = MetricCurves.from_records(metrics)
    has_steps = bool(curves.effective) or any(event.get("kind") == "resumed" for event in events)
    reports = reports_steps(run, has_steps=has_steps, completed=name == "COMPLETED")
    until = now if name in _ACTIVE_STATES else None
    breakdown = TimeBreakdown.from_records(
        events, metrics, until=until, waits=name == "PENDING", reports_steps=reports
    )
    start = breakdown.spans[0].start_us / 1e6 if breakdown.spans else 0.0
    end = breakdown.spans[-1].end_us / 1e6 if breakdown.spans else 0.0
    attempts = read_attempts(events, breakdown, curves.by_attempt)
    if attempts and name in ("CANCELLED", STOPPED_EARLY):
        mark_cancelled(attempts[-1])
    elif attempts and attempts[-1].end is None and name == "FAILED":
        attempts[-1].end, attempts[-1].cause = "vanished", VANISHED_CAUSE
    first_step = (attempts[0].resumed_step or 0) if attempts else 0
    num_steps = max(0, max(curves.effective, default=0) - first_step)
    spec, environment = redact_spec(read_spec(run.spec)), redact_environment(read_environment(run))
    hparams = merge_hparams(spec, environment)
    devices = read_device_metrics(run.all_telemetry(), start, end)
    remarks = [
        f"# {name} remained {applied}, the value in the checkpoint, although the script set {asked}"
        for name, applied, asked in ignored_hparams(environment)
    ]
    for name_of_hparams in ("hparams", "ignored"):
        environment.pop(name_of_hparams, None)
    return RunData(
        run_id=run.run_id,
        folder=str(run.path),
        state=name,
        words=state.words,
        cause=state.cause or _recorded_cause(events, attempts, name),
        now=now,
        events=events,
        spec=spec,
        breakdown=breakdown,
        goodput=compute_goodput(breakdown, curves.effective.values(), first_step),
        curves=curves,
        attempts=attempts,
        checkpoints=read_checkpoints(run, events),
        rates=step_rates(metrics, start),
        codes=read_codes(run),
        environment=environment,
        hparams=hparams,
        best=find_best(run.checkpoints, curves, environment, *read_ranking(run)),
        devices=devices,
        energy=_energy_use(devices, breakdown, num_steps, environment),
        resubmit_command=[*state.resubmit_command, *(remarks if state.resubmit_command else ())],
        reports_steps=reports,
        notes=[*breakdown.notes] if breakdown.spans else ["Nothing has been recorded for this run yet."],
    )


def _energy_use(
    devices: DeviceMetrics, breakdown: TimeBreakdown, steps: int, environment: Mapping[str, Any]
) -> EnergyUse | None:
    if not any(devices.energy_j):
        return None
    start_us, width_us = breakdown.spans[0].start_us, breakdown.wall_us / COLUMNS
    lost_j = 0.0
    for span in breakdown.spans:
        if span.category is TimeCategory.LOST:
            first, last = ((time_us - start_us) / width_us for time_us in (span.start_us, span.end_us))
            for column in range(int(first), min(COLUMNS, int(last) + 1)):
                overlap = min(last, column + 1) - max(first, column)
                lost_j += devices.energy_j[column] * max(0.0, overlap)
    settings = environment.get("settings")
    batch_size = settings.get("global_batch_size") if isinstance(settings, dict) else None
    total_kwh = sum(devices.energy_j) / _J_PER_KWH
    samples = steps * batch_size if isinstance(batch_size, int) else 0
    return EnergyUse(total_kwh, lost_j / _J_PER_KWH, total_kwh / samples if samples else None)


def _recorded_state(run: RunDir, events: Sequence[Mapping[str, Any]]) -> str:
    for event in reversed(events):
        if event.get("kind") == "finished":
            return str(event.get("state"))
        if event.get("kind") == "seen" and run.cancel_request.exists():
            return "CANCELLED"
        if event.get("kind") in ("started", "submitted"):
            break
    return "UNKNOWN"


def _recorded_cause(
    events: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt], state: str
) -> str | None:
    if state != "FAILED":
        return None
    finished = [event for event in events if event.get("kind") == "finished"]
    cause = finished[-1].get("cause") if finished else None
    return str(cause) if cause else (attempts[-1].cause if attempts else None)


def format_setting(value: object) -> str:
    """Return a value of a specification or of the environment as a string."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
