"""Node check before the ranks start: one process per rank records the results."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from hpctrain import system
from hpctrain.files import read_json
from hpctrain.rundir import RunDir
from hpctrain.spec.job_spec import JobSpec
from hpctrain.spec.restart_policy import EndKind
from hpctrain.supervisor.failures.diagnosis import describe_nodes
from hpctrain.supervisor.launch.auxiliary_step import run_auxiliary_step
from hpctrain.supervisor.launch.container_command import module_command
from hpctrain.supervisor.launch.job_step import Launcher

log = logging.getLogger(__name__)

#: Time limit of a check; ranks without a result count as failed.
_LIMIT_S = 90.0
#: Failures that cause a check of the nodes if `node_check` is `auto`.
_SUSPICIOUS = frozenset({EndKind.GPU, EndKind.COMMUNICATION, EndKind.HANG})


def node_check_is_due(spec: JobSpec, last: EndKind | None) -> bool:
    """Return true if the nodes must be checked before the next attempt."""
    return spec.node_check == "always" or (spec.node_check == "auto" and last in _SUSPICIOUS)


@dataclass(frozen=True)
class NodeCheckResult:
    """Result of a node check."""

    bad_nodes: dict[str, str] = field(default_factory=dict)
    """Nodes on which a rank failed its check, with the reason."""
    stopped: bool = False
    """True if the processes received a stop signal."""


@dataclass(frozen=True)
class NodeCheckRunner:
    """Runs the node check on all ranks of an attempt."""

    run: RunDir
    spec: JobSpec
    launcher: Launcher

    def run_check(self, attempt: int) -> NodeCheckResult:
        """Check the nodes before the attempt."""
        begun = system.monotonic()
        end = run_auxiliary_step(
            self.run,
            self.launcher,
            module_command(self.spec, "node_check"),
            attempt,
            limit_s=_LIMIT_S,
            what="the node check",
        )
        found = self._read(attempt)
        bad = describe_nodes(found.bad_nodes) or "no faulty node identified"
        words = "stop requested" if found.stopped else bad
        log.info("node check took %.1f s: %s", system.monotonic() - begun, words)
        if end is not None and not any(self.run.node_check_results(attempt)):
            # If no process could start, no single node is to blame.
            log.warning("the node check did not start: %s", end.stderr_tail)
            return NodeCheckResult()
        return found

    def _read(self, attempt: int) -> NodeCheckResult:
        hosts, each = self.launcher.hosts, self.spec.processes_per_node
        found: dict[str, str] = {}
        for rank in range(len(hosts) * each):
            try:
                record = read_json(self.run.node_check_result(attempt, rank))
                trouble = [str(words) for words in record["trouble"]]
            except (OSError, ValueError, KeyError, TypeError):
                record, trouble = {}, ["the check did not finish"]
            if record.get("stopped"):
                return NodeCheckResult(stopped=True)
            if trouble:
                found.setdefault(hosts[rank // each], "; ".join(trouble))
        # If every node reports a problem, the cause is shared, such as the network.
        return NodeCheckResult(found if len(found) < len(hosts) or len(hosts) == 1 else {})
