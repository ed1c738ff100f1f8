"""Start a step of standby workers in advance for the next attempt.

Standby workers run the same command on the same nodes as other workers, with the same Slurm environment. The
slow imports are done in advance. Training begins when the workers receive the address of the next attempt's
store.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain import system
from hpctrain.rundir import ATTEMPT_VARIABLE, STANDBY_VARIABLE
from hpctrain.supervisor.launch.job_step import EmitEvent, JobStep, Launcher, StepEvent
from hpctrain.supervisor.workers.heartbeat_server import HeartbeatServer
from hpctrain.text import pluralize

log = logging.getLogger(__name__)


class StandbyWorkers:
    """A step whose ranks wait for the next attempt."""

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
        self._step = launcher.start(command, environ, self._on_event, beside=True)

    def on_message(self, rank: int, message: Mapping[str, Any]) -> None:
        if message.get("ready"):
            self._ready.add(rank)
            if len(self._ready) == self._world_size:
                log.info(
                    "%s ready for attempt %d", pluralize(self._world_size, "standby worker"), self.attempt
                )
        elif "why" in message:
            log.warning("standby worker %d failed: %s", rank, message["why"])
            self._is_broken = True

    def is_usable(self, attempt: int, hosts: Sequence[str]) -> bool:
        """Return true if the standby workers can replace a new launch: all of them are connected.

        They may still be importing modules, which is faster than launching new workers.
        """
        fits = (self.attempt, self.hosts) == (attempt, list(hosts))
        return fits and not self._is_broken and self._server.num_connected(self.attempt) == self._world_size

    def activate(self, variables: Mapping[str, str], emit: EmitEvent) -> JobStep | None:
        """Start training in the workers, with these additional variables. `emit` receives later events.

        Returns None if a worker could not be reached; in that case, the step is closed.
        """
        num_reached = self._server.send(self.attempt, {"go": dict(variables)})
        with self._lock:
            if num_reached < self._world_size:
                self._is_broken = True
            else:
                self._emit = emit
        if self._is_broken:
            log.warning(
                "attempt %d: a standby worker is unreachable, so new workers will be started", self.attempt
            )
            self.close()
            return None
        log.info("attempt %d: using %s", self.attempt, pluralize(num_reached, "standby worker"))
        return self._step

    def close(self) -> None:
        """End the step. Waits for a bounded time until all processes have exited."""
        self._step.close()

    def _on_event(self, event: StepEvent) -> None:
        with self._lock:
            emit = self._emit
            if emit is None:
                self._is_broken = True
        if emit is not None:
            emit(event)
