"""Watch the nodes while an attempt trains: leave nodes that are drained, and use nodes that become free."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

from hpctrain import system
from hpctrain.errors import SchedulerError
from hpctrain.files import write_atomic
from hpctrain.rundir import RunDir
from hpctrain.spec.job_spec import JobSpec
from hpctrain.spec.restart_policy import REQUEUE_HOLD_S, START_S
from hpctrain.supervisor.failures.classify import gpu_faults
from hpctrain.supervisor.job_control.job_control import JobControl
from hpctrain.supervisor.launch.job_step import Launcher, StepEvent, StopRequested
from hpctrain.supervisor.periodic_check import PeriodicCheck
from hpctrain.supervisor.policy.decide import Allocation, describe_nodes
from hpctrain.supervisor.policy.history import History
from hpctrain.text import pluralize

log = logging.getLogger(__name__)

#: Longest interval between two queries of the nodes' state. Each is one RPC to the controller.
_DRAIN_INTERVAL_S = 120.0
#: Longest interval between two searches for free nodes.
_FREE_INTERVAL_S = 60.0
#: Required ratio of the gain to the cost of the pause: the wait in the queue is unknown.
_MARGIN = 1.1
#: Assumed remaining time of a job without a time limit.
_HORIZON_S = 86_400.0


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
        """Stop the ranks if enough nodes remain besides those that are drained or have a faulty GPU."""
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
            _announce_requeue(self.run, self.attempt)
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
    """Nodes that train now."""

    purpose = "scale up the run"

    def __post_init__(self) -> None:
        is_wanted = self.num_nodes < self.spec.nodes and self.job_control.nodes is not None
        self.first_s = float(self.spec.scale_up_after_s) if is_wanted else 0.0
        self.interval_s = min(_FREE_INTERVAL_S, self.first_s)

    def check(self) -> bool:
        """Requeue the run if more nodes are worth the pause."""
        nodes = self.job_control.nodes
        assert nodes is not None
        excluded = History.from_events(self.run.read_events()).excluded
        num_nodes = min(self.spec.nodes, self.num_nodes + nodes.num_free(excluded))
        left_s = self.job_control.seconds_left()
        pause_s = START_S + (0.0 if self.spec.resume_mode == "successor" else REQUEUE_HOLD_S)
        if not should_scale_up(self.num_nodes, num_nodes, _HORIZON_S if left_s is None else left_s, pause_s):
            return False
        if self._ended.is_set():
            return True
        log.info("requeueing to scale up from %s to %d", pluralize(self.num_nodes, "node"), num_nodes)
        # Record the reason before the ranks record the stop.
        self.run.log_event("grow", self.attempt, nodes_before=self.num_nodes, nodes=num_nodes)
        _announce_requeue(self.run, self.attempt)
        try:
            nodes.stop_ranks()
        except SchedulerError:
            self.run.requeue_request.unlink(missing_ok=True)
            raise
        return True


def _announce_requeue(run: RunDir, attempt: int) -> None:
    # Preemptions send the same signal: without this file, the ranks expect to be killed soon.
    with suppress(OSError):
        write_atomic(run.requeue_request, f"{attempt}\n", durable=False)
