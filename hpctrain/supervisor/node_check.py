"""The check of the nodes before the ranks start: one process a rank, which writes down what it sees."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from hpctrain.jobs.restart import Kind
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.supervisor.command import module_command
from hpctrain.supervisor.side_step import run_side_step
from hpctrain.supervisor.step import Launcher

log = logging.getLogger(__name__)

#: A check that takes longer is given up, and those that have not answered by then are at fault.
_LIMIT_S = 90.0
#: Failures after which the nodes are looked at, where the user leaves it open.
_SUSPICIOUS = frozenset({Kind.GPU, Kind.NCCL, Kind.HANG})


def is_due(spec: JobSpec, last: Kind | None) -> bool:
    """Whether the nodes are to be looked at before a start.

    Args:
        spec: the job.
        last: how the attempt before ended; None where there was none in this job.
    """
    return spec.node_check == "always" or (spec.node_check == "auto" and last in _SUSPICIOUS)


@dataclass(frozen=True)
class Looked:
    """What a look at the nodes has shown."""

    bad: dict[str, str] = field(default_factory=dict)
    """Nodes on which a rank could not do its work, and why."""
    stopped: bool = False
    """Whether the processes were told to stop, as ranks are."""


@dataclass(frozen=True)
class NodeCheck:
    """Has all ranks of a start look at their nodes."""

    run: RunDir
    spec: JobSpec
    launcher: Launcher

    def look(self, attempt: int) -> Looked:
        """Look at the nodes before the attempt."""
        begun = time.monotonic()
        end = run_side_step(
            self.run,
            self.launcher,
            module_command(self.spec, "node_check"),
            attempt,
            limit_s=_LIMIT_S,
            what="the check of the nodes",
        )
        found = self._read(attempt)
        words = "told to stop" if found.stopped else found.bad or "all are fine"
        log.info("the nodes were looked at in %.1f s: %s", time.monotonic() - begun, words)
        if end is not None and not any(self.run.checks(attempt)):
            # Nobody could look: that says nothing of any one node.
            log.warning("the check of the nodes did not start: %s", end.words)
            return Looked()
        return found

    def _read(self, attempt: int) -> Looked:
        hosts, each = self.launcher.hosts, self.spec.processes_per_node
        found: dict[str, str] = {}
        for rank in range(len(hosts) * each):
            try:
                record: dict[str, Any] = json.loads(self.run.check(attempt, rank).read_text(encoding="utf-8"))
                trouble = [str(words) for words in record["trouble"]]
            except (OSError, ValueError, KeyError):
                record, trouble = {}, ["its check did not come to an end"]
            if record.get("stopped"):
                return Looked(stopped=True)
            if trouble:
                found.setdefault(hosts[rank // each], "; ".join(trouble))
        # What all complain of is no one node's fault: the network between them, perhaps.
        return Looked(found if len(found) < len(hosts) or len(hosts) == 1 else {})
