"""Leave nodes that Slurm drains, or whose GPU reports a fault."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain import system
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.supervisor.failures.gpu_faults import gpu_faults
from hpctrain.supervisor.job_control import JobControl
from hpctrain.supervisor.launch.job_step import Launcher, StepEvent, StopRequested
from hpctrain.supervisor.monitors.periodic_check import PeriodicCheck
from hpctrain.supervisor.policy.decide import Allocation, describe_nodes
from hpctrain.supervisor.policy.history import History

#: Longest interval between two queries of the nodes' state. Each is one RPC to the controller.
_DRAIN_INTERVAL_S = 120.0


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
