"""Requeue a run that trains on fewer nodes than requested once enough nodes are free."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hpctrain.errors import SchedulerError
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.slurm.prepare_job_end import REQUEUE_HOLD_S
from hpctrain.supervisor.job_control import JobControl
from hpctrain.supervisor.monitors.periodic_check import PeriodicCheck
from hpctrain.supervisor.policy.history import History
from hpctrain.text import pluralize

log = logging.getLogger(__name__)

#: Longest interval between two searches for free nodes.
_FREE_INTERVAL_S = 60.0
#: Required ratio of the gain to the cost of the pause: the wait in the queue is unknown.
_MARGIN = 1.1
#: The ranks start in about one minute.
_START_S = 60.0
#: Assumed remaining time of a job without a time limit.
_HORIZON_S = 86_400.0


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
