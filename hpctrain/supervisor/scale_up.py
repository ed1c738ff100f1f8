"""Scale-up of an elastic run on fewer nodes than its maximum: when to requeue for more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hpctrain.errors import HpctrainError
from hpctrain.jobs.runs.control import requeue
from hpctrain.rundir import RunDir
from hpctrain.slurm.environment import strip_job_env
from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor.job_control.base import JobControl
from hpctrain.supervisor.policy.history import History
from hpctrain.text import pluralize

log = logging.getLogger(__name__)

#: Required gain over the cost of the pause: the wait in the queue is unknown.
_MARGIN = 1.1
#: Assumed time left of a job without a time limit.
_HORIZON_S = 86_400.0
#: Slurm holds a requeued job for two minutes; the ranks then start in about one.
_HOLD_S, _START_S = 120.0, 60.0
#: Longest interval between two searches for free nodes.
_LOOK_EVERY_S = 60.0


def should_scale_up(nodes: int, nodes_then: int, left_s: float, pause_s: float) -> bool:
    """True if a pause and then more nodes train more in the remaining time than the current nodes.

    Args:
        nodes: nodes that train now.
        nodes_then: nodes after the pause.
        left_s: seconds left of the job's time.
        pause_s: seconds without training.
    """
    return nodes_then * (left_s - pause_s) > _MARGIN * nodes * left_s


@dataclass
class ScaleUpMonitor:
    """Watches for free nodes while an attempt trains, and requeues the run to use them."""

    run: RunDir
    spec: JobSpec
    scheduler: JobControl
    environ: Mapping[str, str]
    attempt: int
    nodes: int
    """Nodes that train now."""

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hpctrain-grower", daemon=True)

    @property
    def is_wanted(self) -> bool:
        """True if the run trains on fewer nodes than its maximum and should look for more."""
        return self.spec.scale_up_after_s > 0 and self.nodes < self.spec.nodes and self.scheduler.has_machines

    def __enter__(self) -> Self:
        if self.is_wanted:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _watch(self) -> None:
        wait_s = float(self.spec.scale_up_after_s)
        while not self._over.wait(wait_s):
            wait_s = min(_LOOK_EVERY_S, float(self.spec.scale_up_after_s))
            try:
                if self._grow():
                    return
            except HpctrainError as error:
                log.warning("cannot determine whether more nodes are available: %s", error)

    def _grow(self) -> bool:
        """Requeue the run if more nodes are worth it. Returns True if the monitor can stop."""
        excluded = History.of(self.run.read_events()).excluded
        more = self.scheduler.free_nodes(excluded)
        then = min(self.spec.nodes, self.nodes + more)
        left_s = self.scheduler.seconds_left()
        pause_s = _START_S + (0.0 if self.spec.resume_mode == "successor" else _HOLD_S)
        if not should_scale_up(self.nodes, then, _HORIZON_S if left_s is None else left_s, pause_s):
            return False
        if self._over.is_set():
            return True
        log.info("requeueing to grow from %s to %d", pluralize(self.nodes, "node"), then)
        # Record the reason before the ranks record their stop.
        self.run.log_event("grow", self.attempt, nodes_before=self.nodes, nodes=then)
        requeue(self.run, strip_job_env(self.environ))
        return True
