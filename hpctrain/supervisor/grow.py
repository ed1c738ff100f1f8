"""An elastic run on fewer nodes than it may have: when to give them back and ask for more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hpctrain.errors import HpctrainError
from hpctrain.jobs.environment import outer_environment
from hpctrain.jobs.spec import JobSpec
from hpctrain.jobs.steer import requeue
from hpctrain.rundir import RunDir
from hpctrain.supervisor.history import History
from hpctrain.supervisor.scheduler import Scheduler

log = logging.getLogger(__name__)

#: What more nodes have to bring beyond what the pause costs: nobody knows how long the queue will be.
_MARGIN = 1.1
#: A job without a time limit is taken to have this long.
_HORIZON_S = 86_400.0
#: Slurm holds a requeued job for two minutes; the ranks then start in about one.
_HOLD_S, _START_S = 120.0, 60.0
#: Free nodes are looked for this often at most.
_LOOK_EVERY_S = 60.0


def worth_growing(nodes: int, nodes_then: int, left_s: float, pause_s: float) -> bool:
    """Whether more is trained until the job's time is over with a pause and more nodes than without.

    Args:
        nodes: that train now.
        nodes_then: that would train after the pause.
        left_s: of the job's time.
        pause_s: in which nothing is trained.
    """
    return nodes_then * (left_s - pause_s) > _MARGIN * nodes * left_s


@dataclass
class Grower:
    """Looks for free nodes while an attempt trains, and has the run save and go on with them."""

    run: RunDir
    spec: JobSpec
    scheduler: Scheduler
    environ: Mapping[str, str]
    attempt: int
    nodes: int
    """That train now."""

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hpctrain-grower", daemon=True)

    @property
    def is_wanted(self) -> bool:
        """Whether the run trains on fewer nodes than it may have, and is to look for more."""
        return self.spec.grow_after_s > 0 and self.nodes < self.spec.nodes and self.scheduler.has_machines

    def __enter__(self) -> Self:
        if self.is_wanted:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _watch(self) -> None:
        wait_s = float(self.spec.grow_after_s)
        while not self._over.wait(wait_s):
            wait_s = min(_LOOK_EVERY_S, float(self.spec.grow_after_s))
            try:
                if self._grow():
                    return
            except HpctrainError as error:
                log.warning("whether there are more nodes cannot be told: %s", error)

    def _grow(self) -> bool:
        """Have the run go on with more nodes, where that is worth it. Returns whether it was told to."""
        excluded = History.of(self.run.read_events()).excluded
        more = self.scheduler.free_nodes(excluded)
        then = min(self.spec.nodes, self.nodes + more)
        left_s = self.scheduler.seconds_left()
        pause_s = _START_S + (0.0 if self.spec.continue_by == "successor" else _HOLD_S)
        if not worth_growing(self.nodes, then, _HORIZON_S if left_s is None else left_s, pause_s):
            return False
        if self._over.is_set():
            return True
        log.info("%d nodes train, and %d could: the run gives them back to get these", self.nodes, then)
        # Before the ranks say that they stop: this is why.
        self.run.log_event("grow", self.attempt, nodes_before=self.nodes, nodes=then)
        requeue(self.run, outer_environment(self.environ))
        return True
