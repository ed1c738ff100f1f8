"""Stop a trial of a sweep whose metric is worse than that of the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from hpctrain import system
from hpctrain.errors import UserError
from hpctrain.files import write_atomic
from hpctrain.record_types import StepRecord, TrialLine, read_records
from hpctrain.records.log_tail import RecordTail
from hpctrain.rundir import STOPPED_EARLY, RunDir
from hpctrain.supervisor.launch.job_step import StepEvent, StopRequested
from hpctrain.supervisor.monitors.periodic_check import PeriodicCheck
from hpctrain.sweeps.stopping_rules import StoppingRule, TrialCurve, TrialReport
from hpctrain.sweeps.sweep_record import read_sweep

log = logging.getLogger(__name__)

_TRIAL_INTERVAL_S = 1.0
#: Seconds per trial between two comparisons, to limit the load on the file system.
_INTERVAL_PER_TRIAL_S = 0.02


@dataclass
class EarlyStoppingMonitor(PeriodicCheck):
    """Watches the metric of a trial while an attempt trains, and stops the ranks if the trial loses.

    At each decision step, a trial writes its metric to its own folder, where the other trials read it. A
    trial is judged by its newest report, and judged again whenever another trial reaches the same step.
    """

    run: RunDir
    events: system.SimpleQueue[StepEvent]

    purpose = "compare this trial with the others"

    def __post_init__(self) -> None:
        self.interval_s, self._due = _TRIAL_INTERVAL_S, 0.0
        self._rule = self._read_rule()
        self.first_s = self.interval_s if self._rule is not None else 0.0
        self._newest = max(self._reports(self.run), key=lambda report: report.step, default=None)
        self._tail = RecordTail(self.run.metrics, StepRecord)
        self._curve = TrialCurve(self._rule) if self._rule is not None else None

    def _read_rule(self) -> StoppingRule | None:
        """Return the rule of the sweep; None if the user resumed a trial that had been stopped early."""
        if self.run.array is None:
            return None
        try:
            sweep = read_sweep(self.run.array)
        except (UserError, OSError) as error:
            log.warning("early stopping is disabled for this trial: %s", error)
            return None
        stopped = any(event.state == STOPPED_EARLY for event in self.run.read_events())
        return None if sweep is None or stopped else sweep.stopping

    def check(self) -> bool:
        assert self._rule is not None
        assert self._curve is not None
        with suppress(OSError):
            for report in filter(None, map(self._curve.add, self._tail.read())):
                if self._newest is None or report.step > self._newest.step:
                    self.run.storage.append(self.run.early_stopping, report.record())
                    self._newest, self._due = report, 0.0
            if (newest := self._newest) is None or system.monotonic() < self._due:
                return False
            array = self.run.array
            assert array is not None
            trials = [trial for trial in map(array.task, array.tasks()) if trial.path != self.run.path]
            self._due = system.monotonic() + _INTERVAL_PER_TRIAL_S * len(trials)
            reports = (report for trial in trials for report in self._reports(trial))
            rivals = [report for report in reports if report.step == newest.step]
            if reason := self._rule.reason_to_stop(newest, rivals):
                self._stop(reason)
                return True
        return False

    def _reports(self, trial: RunDir) -> Iterator[TrialReport]:
        return map(TrialReport.from_line, read_records(trial.early_stopping, TrialLine))

    def _stop(self, reason: str) -> None:
        if self._ended.is_set():
            return
        # The reason distinguishes this request from that of a user.
        write_atomic(self.run.cancel_request, f"{reason}\n", durable=False)
        self.events.put(StopRequested(reason))
