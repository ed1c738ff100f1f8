"""Choice of the nodes that run ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.errors import SchedulerError
from hpctrain.rundir import RunDir
from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor.failures.diagnosis import describe_nodes
from hpctrain.supervisor.job_control.slurm_nodes import SlurmNodes
from hpctrain.supervisor.launch.job_step import Launcher
from hpctrain.supervisor.policy.decide import Action, Allocation, Decision, suspect_nodes
from hpctrain.supervisor.policy.history import History

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeChoice:
    """Sets the nodes of the launcher; other nodes are spare, lost or excluded."""

    run: RunDir
    spec: JobSpec
    launcher: Launcher
    control: SlurmNodes | None

    def drop_excluded(self) -> None:
        """Use only nodes that are not excluded, if the allocation has enough of them."""
        excluded = History.from_events(self.run.read_events()).excluded
        nodes = Allocation(tuple(self.launcher.hosts), tuple(self.launcher.spares))
        hosts = list(nodes.usable(excluded))
        if len(hosts) >= self.spec.min_nodes:
            spares = [host for host in self.launcher.spares if host not in hosts and host not in excluded]
            self.launcher.hosts, self.launcher.spares = hosts, spares

    def allocation(self, history: History, lost: Mapping[str, str]) -> Allocation:
        """Return the state of the allocation; query the scheduler only if nodes must be excluded."""
        found = suspect_nodes(self.spec.policy, history) if self.control is not None else {}
        return Allocation(
            in_use=tuple(self.launcher.hosts),
            spare=tuple(self.launcher.spares),
            lost=lost,
            min_nodes=self.spec.min_nodes,
            can_reallocate=bool(
                found and self.control and self.control.can_reallocate(history.excluded.union(found))
            ),
        )

    def change(self, attempt: int, decision: Decision, lost: Mapping[str, str]) -> None:
        """Continue on the chosen nodes of the allocation, and release lost nodes."""
        before, hosts = self.launcher.hosts, list(decision.hosts)
        gone = {**lost, **decision.exclude}
        self.run.log_event(
            "shrink" if decision.action is Action.SHRINK else "replace",
            attempt,
            nodes=len(hosts),
            nodes_before=len(before),
            hosts=hosts,
            lost=[host for host in before if host not in hosts],
            cause=describe_nodes(gone),
        )
        spares = [host for host in self.launcher.spares if host not in hosts and host not in gone]
        if lost and self.control is not None:
            try:
                self.control.shrink_to([*hosts, *spares])
            except SchedulerError as error:
                log.warning("cannot release the lost nodes, so Slurm may end the job: %s", error)
        self.launcher.hosts, self.launcher.spares = hosts, spares
