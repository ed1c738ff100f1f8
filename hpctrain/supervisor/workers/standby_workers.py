"""Standby workers: a step for the next attempt, started in advance.

They run the same command on the same nodes as other workers, so Slurm gives them all that it gives to ranks.
They have done the slow imports and begin when they receive the address of the next attempt's store.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

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
        """Start the step.

        Args:
            launcher: starts the step.
            server: connections that tell the ranks to begin.
            command: command of each process.
            variables: variables of the next attempt, as far as they are known.
            modules: modules to import in advance.
            world_size: number of its ranks.

        Raises:
            OSError: the step cannot be started.
        """
        self.attempt = int(variables[ATTEMPT_VARIABLE])
        self.hosts = list(launcher.hosts)
        self._server, self._world_size = server, world_size
        self._lock = threading.Lock()
        self._emit: EmitEvent | None = None
        self._ready: set[int] = set()
        self._is_broken = False
        told = {**variables, STANDBY_VARIABLE: json.dumps(list(modules))}
        self._step = launcher.start(command, told, self._on_event, beside=True)

    def on_message(self, rank: int, message: Mapping[str, Any]) -> None:
        """Handle a worker's message that it is ready, or has failed."""
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
        """True if the standby workers can replace a fresh start: all of them are connected.

        They need not be ready: those that still import began earlier than fresh ones would.
        """
        fits = (self.attempt, self.hosts) == (attempt, list(hosts))
        return fits and not self._is_broken and self._server.num_connected(self.attempt) == self._world_size

    def activate(self, variables: Mapping[str, str], emit: EmitEvent) -> JobStep | None:
        """Tell the workers to begin, with these additional variables. From then on, events go to `emit`.

        Returns None if a worker could not be reached; the whole step is then closed.
        """
        told = self._server.send(self.attempt, {"go": dict(variables)})
        with self._lock:
            if told < self._world_size:
                self._is_broken = True
            else:
                self._emit = emit
        if self._is_broken:
            log.warning("attempt %d: lost a standby worker", self.attempt)
            self.close()
            return None
        log.info("attempt %d: using %s", self.attempt, pluralize(told, "standby worker"))
        return self._step

    def close(self) -> None:
        """End the step. Waits, for a bounded time, until no process is left."""
        self._step.close()

    def _on_event(self, event: StepEvent) -> None:
        with self._lock:
            emit = self._emit
            if emit is None:
                self._is_broken = True
        if emit is not None:
            emit(event)
