"""Watch an attempt: leave drained nodes, use free nodes, and stop losing trials of a sweep."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from hpctrain import system
from hpctrain.errors import HpctrainError, SchedulerError, UserError
from hpctrain.files import write_atomic
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.record_types import StepRecord, TrialLine, read_records
from hpctrain.records.log_tail import RecordTail
from hpctrain.rundir import STOPPED_EARLY, RunDir
from hpctrain.slurm.job_end import REQUEUE_HOLD_S
from hpctrain.supervisor.failures.gpu_faults import gpu_faults
from hpctrain.supervisor.job_control import JobControl
from hpctrain.supervisor.launch.job_step import Launcher, StepEvent, StopRequested
from hpctrain.supervisor.policy.decide import Allocation, describe_nodes
from hpctrain.supervisor.policy.history import History
from hpctrain.sweeps.stopping_rules import StoppingRule, TrialCurve, TrialReport
from hpctrain.sweeps.sweep_record import read_sweep
from hpctrain.text import pluralize

log = logging.getLogger(__name__)

#: Longest interval between two queries of the nodes' state. Each is one RPC to the controller.
_DRAIN_INTERVAL_S = 120.0
#: Longest interval between two searches for free nodes.
_FREE_INTERVAL_S = 60.0
#: Required ratio of the gain to the cost of the pause: the wait in the queue is unknown.
_MARGIN = 1.1
#: The ranks start in about one minute.
_START_S = 60.0
#: Assumed remaining time of a job without a time limit.
_HORIZON_S = 86_400.0
_TRIAL_INTERVAL_S = 1.0
#: Seconds per trial between two comparisons, to limit the load on the file system.
_INTERVAL_PER_TRIAL_S = 0.02


class PeriodicCheck:
    """Runs `check` in a thread until it returns True, or until the context ends; errors are logged."""

    first_s: float
    interval_s: float
    purpose: str

    def __enter__(self) -> Self:
        self._ended = system.Event()
        if self.first_s > 0:
            system.Thread(target=self._watch, name=f"hpctrain-{type(self).__name__}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def check(self) -> bool:
        """Check once. Returns True if no further check is required."""
        raise NotImplementedError

    def _watch(self) -> None:
        wait_s = self.first_s
        while not self._ended.wait(wait_s):
            wait_s = self.interval_s
            try:
                if self.check():
                    return
            except (HpctrainError, OSError) as error:
                log.warning("cannot %s (%s); will retry", self.purpose, error)


@dataclass
class NodeDrainMonitor(PeriodicCheck):
    """Watches the nodes of an attempt, and stops the ranks if a node is drained and others can replace it.

    Only elastic runs and runs with spare nodes are watched: other runs would lose their allocation.
    """

    run: RunDir
    spec: JobSpec
    job_control: JobControl
    attempt: int
    launcher: Launcher
    events: system.SimpleQueue[StepEvent]

    purpose = "query the state of the nodes"

    def __post_init__(self) -> None:
        self._started_at = system.time()
        has_others = len(self.launcher.hosts) + len(self.launcher.spares) > self.spec.min_nodes
        is_wanted = has_others and self.job_control.nodes is not None
        self.interval_s = min(_DRAIN_INTERVAL_S, float(self.spec.scale_up_after_s) or _DRAIN_INTERVAL_S)
        self.first_s = self.interval_s if is_wanted else 0.0

    def check(self) -> bool:
        control, hosts, spares = self.job_control.nodes, self.launcher.hosts, self.launcher.spares
        assert control is not None
        leaving = control.draining([*hosts, *spares])
        for host, xids in gpu_faults(self.run, hosts, self._started_at).items():
            leaving[host] = f"the GPU driver reported Xid {xids[0]}"
        leaving.pop(control.own_host, None)
        excluded = History.from_events(self.run.read_events()).excluded
        usable = Allocation(tuple(hosts), tuple(spares), leaving).usable(excluded)
        if leaving.keys().isdisjoint(hosts) or len(usable) < self.spec.min_nodes:
            return False
        if not self._ended.is_set():
            self.run.request_requeue(self.attempt)
            self.events.put(StopRequested(describe_nodes(leaving), leaving))
        return True


def should_scale_up(nodes: int, new_nodes: int, left_s: float, pause_s: float) -> bool:
    """Return true if more nodes after a pause train more in the remaining time than the current nodes."""
    return new_nodes * (left_s - pause_s) > _MARGIN * nodes * left_s


@dataclass
class ScaleUpMonitor(PeriodicCheck):
    """Watches for free nodes while an attempt trains, and requeues the run to use them."""

    run: RunDir
    spec: JobSpec
    job_control: JobControl
    attempt: int
    num_nodes: int

    purpose = "scale up the run"

    def __post_init__(self) -> None:
        is_wanted = self.num_nodes < self.spec.nodes and self.job_control.nodes is not None
        self.first_s = float(self.spec.scale_up_after_s) if is_wanted else 0.0
        self.interval_s = min(_FREE_INTERVAL_S, self.first_s)

    def check(self) -> bool:
        nodes = self.job_control.nodes
        assert nodes is not None
        excluded = History.from_events(self.run.read_events()).excluded
        num_nodes = min(self.spec.nodes, self.num_nodes + nodes.num_free(excluded))
        left_s = self.job_control.seconds_left()
        pause_s = _START_S + (0.0 if self.spec.resume_mode == "successor" else REQUEUE_HOLD_S)
        if not should_scale_up(self.num_nodes, num_nodes, _HORIZON_S if left_s is None else left_s, pause_s):
            return False
        if self._ended.is_set():
            return True
        log.info("requeueing to scale up from %s to %d", pluralize(self.num_nodes, "node"), num_nodes)
        # Record the reason before the ranks record the stop.
        self.run.log_event("grow", self.attempt, nodes_before=self.num_nodes, nodes=num_nodes)
        self.run.request_requeue(self.attempt)
        try:
            nodes.stop_ranks()
        except SchedulerError:
            self.run.requeue_request.unlink(missing_ok=True)
            raise
        return True


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
            trials = self._trials()
            self._due = system.monotonic() + _INTERVAL_PER_TRIAL_S * len(trials)
            reports = (report for trial in trials for report in self._reports(trial))
            rivals = [report for report in reports if report.step == newest.step]
            if reason := self._rule.reason_to_stop(newest, rivals):
                self._stop(reason)
                return True
        return False

    def _trials(self) -> list[RunDir]:
        array = self.run.array
        assert array is not None
        return [trial for trial in map(array.task, array.tasks()) if trial.path != self.run.path]

    def _reports(self, trial: RunDir) -> Iterator[TrialReport]:
        return map(TrialReport.from_line, read_records(trial.early_stopping, TrialLine))

    def _stop(self, reason: str) -> None:
        if self._ended.is_set():
            return
        # The reason distinguishes this request from that of a user.
        write_atomic(self.run.cancel_request, f"{reason}\n", durable=False)
        self.events.put(StopRequested(reason))
