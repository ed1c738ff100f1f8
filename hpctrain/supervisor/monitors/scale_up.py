"""Scale-up of an elastic run that uses fewer nodes than its maximum, by a requeue."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

from hpctrain.errors import SchedulerError
from hpctrain.files import write_atomic
from hpctrain.rundir import RunDir
from hpctrain.spec.job_spec import JobSpec
from hpctrain.spec.restart_policy import REQUEUE_HOLD_S, START_S
from hpctrain.supervisor.job_control.base import JobControl
from hpctrain.supervisor.monitors.periodic_check import PeriodicCheck
from hpctrain.supervisor.policy.history import History
from hpctrain.text import pluralize

log = logging.getLogger(__name__)

#: Required ratio of the gain to the cost of the pause: the wait in the queue is unknown.
_MARGIN = 1.1
#: Assumed remaining time of a job without a time limit.
_HORIZON_S = 86_400.0
#: Longest interval between two searches for free nodes.
_POLL_INTERVAL_S = 60.0


def should_scale_up(nodes: int, nodes_then: int, left_s: float, pause_s: float) -> bool:
    """Return true if more nodes after a pause train more in the remaining time than the current nodes."""
    return nodes_then * (left_s - pause_s) > _MARGIN * nodes * left_s


@dataclass
class ScaleUpMonitor(PeriodicCheck):
    """Watches for free nodes while an attempt trains, and requeues the run to use them."""

    run: RunDir
    spec: JobSpec
    job_control: JobControl
    attempt: int
    num_nodes: int
    """Nodes that train now."""

    purpose = "scale up the run"

    def __post_init__(self) -> None:
        is_wanted = self.num_nodes < self.spec.nodes and self.job_control.nodes is not None
        self.first_s = float(self.spec.scale_up_after_s) if is_wanted else 0.0
        self.interval_s = min(_POLL_INTERVAL_S, self.first_s)

    def check(self) -> bool:
        """Requeue the run if more nodes are worth the pause."""
        nodes = self.job_control.nodes
        assert nodes is not None
        excluded = History.from_events(self.run.read_events()).excluded
        then = min(self.spec.nodes, self.num_nodes + nodes.num_free(excluded))
        left_s = self.job_control.seconds_left()
        pause_s = START_S + (0.0 if self.spec.resume_mode == "successor" else REQUEUE_HOLD_S)
        if not should_scale_up(self.num_nodes, then, _HORIZON_S if left_s is None else left_s, pause_s):
            return False
        if self._ended.is_set():
            return True
        log.info("requeueing to scale up from %s to %d", pluralize(self.num_nodes, "node"), then)
        # Record the reason before the ranks record the stop.
        self.run.log_event("grow", self.attempt, nodes_before=self.num_nodes, nodes=then)
        # Preemptions send the same signal: without this file, the ranks expect to be killed soon.
        with suppress(OSError):
            write_atomic(self.run.requeue_request, f"{self.attempt}\n", durable=False)
        try:
            nodes.stop_ranks()
        except SchedulerError:
            self.run.requeue_request.unlink(missing_ok=True)
            raise
        return True
