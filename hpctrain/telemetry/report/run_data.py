"""Read the data of a run for a report. Any file of the run may be missing or damaged."""

from __future__ import annotations

import json
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.jobspec.redaction import redact_environment, redact_spec
from hpctrain.record_types import Event, ScriptCheckpoint, StepRecord
from hpctrain.rundir import STOPPED_EARLY, RunDir
from hpctrain.telemetry.accounting.time_breakdown import TimeBreakdown, compute_goodput
from hpctrain.telemetry.accounting.timeline_events import TimeCategory
from hpctrain.telemetry.hparams import ignored_hparams, merge_hparams
from hpctrain.telemetry.report.attempts import (
    VANISHED_CAUSE,
    Attempt,
    describe_arguments,
    mark_cancelled,
    read_attempts,
)
from hpctrain.telemetry.report.device_metrics import DeviceMetrics, read_device_metrics
from hpctrain.telemetry.report.metric_curves import MetricCurves, reports_steps, step_rates
from hpctrain.telemetry.report.run_results import (
    find_best,
    gc_disabled,
    read_checkpoints,
    read_codes,
    read_environment,
    read_ranking,
    read_report_records,
    read_spec,
)

_J_PER_KWH = 3.6e6
_ACTIVE_STATES = ("PENDING", "RUNNING")


@dataclass(frozen=True)
class EnergyUse:
    """Measured energy of the nodes of a run, in kWh."""

    total_kwh: float
    lost_kwh: float
    """Energy for steps that were repeated later."""
    per_sample_kwh: float | None
    """None if the batch size is unknown."""


class RunData:
    """All data of a run, which may have been started without a submission."""

    @gc_disabled()
    def __init__(
        self,
        run: RunDir,
        state: str | None = None,
        words: str = "",
        cause: str | None = None,
        *,
        now: float,
        resubmit_command: Sequence[str] = (),
        script_checkpoints: Sequence[ScriptCheckpoint] = (),
    ) -> None:
        """Read a run with this state; None infers the state from the folder."""
        self.run_id, self.folder, self.now, self.words = run.run_id, str(run.path), now, words
        self.events = read_report_records(run.events, Event)
        metrics = read_report_records(run.metrics, StepRecord)
        self.state = state or _recorded_state(run, self.events)
        self.curves = MetricCurves.from_records(metrics)
        has_steps = bool(self.curves.effective) or any(event.kind == "resumed" for event in self.events)
        #: True if the script reports its steps; None if unknown.
        self.reports_steps = reports_steps(run, has_steps=has_steps, completed=self.state == "COMPLETED")
        self.breakdown = TimeBreakdown.from_records(
            self.events,
            metrics,
            until=now if self.is_going else None,
            waits=self.state == "PENDING",
            reports_steps=self.reports_steps,
        )
        self.attempts = read_attempts(self.events, self.breakdown, self.curves.by_attempt)
        if self.attempts and self.state in ("CANCELLED", STOPPED_EARLY):
            mark_cancelled(self.attempts[-1])
        elif self.attempts and self.attempts[-1].end is None and self.state == "FAILED":
            self.attempts[-1].end, self.attempts[-1].cause = "vanished", VANISHED_CAUSE
        self.cause = cause or _recorded_cause(self.events, self.attempts, self.state)
        self.spec: dict[str, Any] = redact_spec(read_spec(run.spec))
        environment = redact_environment(read_environment(run))
        self.hparams = merge_hparams(self.spec, environment)
        #: The command that reproduces the run, and comments on its values that did not apply.
        self.resubmit_command = list(resubmit_command)
        if self.resubmit_command:
            self.resubmit_command += [
                f"# {name} remained {applied}, the value in the checkpoint, although the script set {asked}"
                for name, applied, asked in ignored_hparams(environment)
            ]
            self.resubmit_command += [f"# Arguments of {line}" for line in describe_arguments(self.events)]
        #: Environment of the newest attempt, and the settings of its training.
        self.environment: dict[str, Any] = {
            name: value for name, value in environment.items() if name not in ("hparams", "ignored")
        }
        first_step = (self.attempts[0].resumed_step or 0) if self.attempts else 0
        self.goodput = compute_goodput(self.breakdown, self.curves.effective.values(), first_step)
        self.checkpoints = read_checkpoints(run, self.events)
        #: True if the run or its script has saved a checkpoint.
        self.has_saved = any(event.kind == "checkpoint" for event in self.events)
        #: Files in the script's own format that exist, oldest first.
        self.script_checkpoints = script_checkpoints
        has_spans = bool(self.breakdown.spans)
        self.rates = step_rates(metrics)
        self.codes = read_codes(run)
        #: Best value of the metric that the user optimizes.
        self.best = find_best(run.checkpoints, self.curves, environment, *read_ranking(run))
        self.devices = (
            read_device_metrics(run.all_telemetry(), self.start, self.end) if has_spans else DeviceMetrics()
        )
        num_steps = max(0, (self.step or 0) - first_step)
        self.energy = _energy_use(self.devices, self.breakdown, num_steps, environment)
        self.notes = [*self.breakdown.notes] if has_spans else ["Nothing has been recorded for this run yet."]
        if not self.is_going and self.events and self.events[-1].note:
            self.notes.append(self.events[-1].note)

    @property
    def start(self) -> float:
        return self.breakdown.spans[0].start_us / 1e6 if self.breakdown.spans else self.now

    @property
    def end(self) -> float:
        return self.breakdown.spans[-1].end_us / 1e6 if self.breakdown.spans else self.now

    @property
    def is_going(self) -> bool:
        return self.state in _ACTIVE_STATES

    @property
    def step(self) -> int | None:
        return max(self.curves.effective, default=None)

    @property
    def steps_per_s(self) -> float | None:
        rates = [rate for _, rate in self.rates if rate is not None]
        return statistics.median(rates) if rates else None

    @property
    def interruptions(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.interrupted]


def _energy_use(
    devices: DeviceMetrics, breakdown: TimeBreakdown, steps: int, environment: Mapping[str, Any]
) -> EnergyUse | None:
    if not devices.energy:
        return None
    lost_spans = [
        (span.start_us / 1e6, span.end_us / 1e6)
        for span in breakdown.spans
        if span.category is TimeCategory.LOST
    ]
    starts = [start for start, _ in lost_spans]
    lost_j = 0.0
    for begin, end, joules in devices.energy:
        overlapping = lost_spans[max(0, bisect_right(starts, begin) - 1) : bisect_left(starts, end)]
        lost_s = sum(max(0.0, min(end, lost_end) - max(begin, start)) for start, lost_end in overlapping)
        lost_j += joules * lost_s / (end - begin)
    settings = environment.get("settings")
    batch_size = settings.get("global_batch_size") if isinstance(settings, dict) else None
    total_kwh = sum(joules for _, _, joules in devices.energy) / _J_PER_KWH
    samples = steps * batch_size if isinstance(batch_size, int) else 0
    return EnergyUse(total_kwh, lost_j / _J_PER_KWH, total_kwh / samples if samples else None)


def _recorded_state(run: RunDir, events: Sequence[Event]) -> str:
    for event in reversed(events):
        if event.kind == "finished":
            return str(event.state)
        if event.kind == "seen" and run.cancel_request.exists():
            return "CANCELLED"
        if event.kind in ("started", "submitted"):
            break
    return "UNKNOWN"


def _recorded_cause(events: Sequence[Event], attempts: Sequence[Attempt], state: str) -> str | None:
    if state != "FAILED":
        return None
    ends = [event for event in events if event.kind == "finished"]
    cause = ends[-1].cause if ends else None
    return cause or (attempts[-1].cause if attempts else None)


def format_setting(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
