"""Keep a step of ranks that have done the slow imports ready for the next attempt."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence

from hpctrain import system
from hpctrain.record_types import RankMessage
from hpctrain.rundir import ATTEMPT_VARIABLE, STANDBY_VARIABLE
from hpctrain.supervisor.launch.job_step import EmitEvent, JobStep, Launcher, StepEvent
from hpctrain.supervisor.workers.heartbeat_server import HeartbeatServer
from hpctrain.text import pluralize

log = logging.getLogger(__name__)


class StandbyWorkers:
    """A step of ranks that have done the slow imports, and wait for the next attempt."""

    def __init__(
        self,
        launcher: Launcher,
        server: HeartbeatServer,
        command: list[str],
        variables: Mapping[str, str],
        modules: Sequence[str],
        world_size: int,
    ) -> None:
        self.attempt = int(variables[ATTEMPT_VARIABLE])
        self.hosts = list(launcher.hosts)
        self._server, self._world_size = server, world_size
        self._lock = system.Lock()
        self._emit: EmitEvent | None = None
        self._ready: set[int] = set()
        self._is_broken = False
        environ = {**variables, STANDBY_VARIABLE: json.dumps(list(modules))}
        self._step = launcher.start(command, environ, self._on_event)

    def on_message(self, rank: int, message: RankMessage) -> None:
        if message.ready:
            self._ready.add(rank)
            if len(self._ready) == self._world_size:
                workers = pluralize(self._world_size, "standby worker")
                log.info("%s ready for attempt %d", workers, self.attempt)
        elif message.why is not None:
            log.warning("standby worker %d failed: %s", rank, message.why)
            self._is_broken = True

    def is_usable(self, attempt: int, hosts: Sequence[str]) -> bool:
        """Return true if all workers are connected; they may still be importing."""
        if self._is_broken or (self.attempt, self.hosts) != (attempt, list(hosts)):
            return False
        return self._server.num_connected(attempt) == self._world_size

    def activate(self, variables: Mapping[str, str], emit: EmitEvent) -> JobStep | None:
        """Start training in the workers; None, and the step is closed, if one could not be reached."""
        num_reached = self._server.send(self.attempt, {"go": dict(variables)})
        with self._lock:
            if num_reached < self._world_size:
                self._is_broken = True
            else:
                self._emit = emit
        if self._is_broken:
            log.warning("attempt %d: a standby worker is unreachable, so new workers start", self.attempt)
            self.close()
            return None
        log.info("attempt %d: using %s", self.attempt, pluralize(num_reached, "standby worker"))
        return self._step

    def close(self) -> None:
        self._step.close()

    def _on_event(self, event: StepEvent) -> None:
        with self._lock:
            emit = self._emit
            if emit is None:
                self._is_broken = True
        if emit is not None:
            emit(event)
