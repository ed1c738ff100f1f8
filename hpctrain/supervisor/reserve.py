"""Workers that wait to take the place of those that train: a step of the next attempt, started beforehand.

They are started by the same command as any others, on the same nodes, so all that Slurm gives to a rank they
have; they have imported what takes long, and begin as soon as they are told the address of the next attempt's
store.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.rundir import ATTEMPT_VARIABLE, WAIT_VARIABLE
from hpctrain.supervisor.lines import Lines
from hpctrain.supervisor.step import Emit, Event, Launcher, Step

log = logging.getLogger(__name__)


class Reserve:
    """A step whose ranks wait."""

    def __init__(
        self,
        launcher: Launcher,
        lines: Lines,
        command: list[str],
        variables: Mapping[str, str],
        modules: Sequence[str],
        world_size: int,
    ) -> None:
        """Start it.

        Args:
            launcher: starts it.
            lines: tell its ranks to begin.
            command: what each process runs.
            variables: those of the attempt that it is for, as far as they are known.
            modules: what to import ahead.
            world_size: the number of its ranks.

        Raises:
            OSError: it cannot be started.
        """
        self.attempt = int(variables[ATTEMPT_VARIABLE])
        self.hosts = list(launcher.hosts)
        self._lines, self._world_size = lines, world_size
        self._lock = threading.Lock()
        self._emit: Emit | None = None
        self._ready: set[int] = set()
        self._is_broken = False
        told = {**variables, WAIT_VARIABLE: json.dumps(list(modules))}
        self._step = launcher.start(command, told, self._note, beside=True)

    @property
    def is_broken(self) -> bool:
        """Whether a worker of it has ended, or cannot import what it should."""
        return self._is_broken

    def hear(self, rank: int, message: Mapping[str, Any]) -> None:
        """A worker is ready, or says why it never will be."""
        if message.get("ready"):
            self._ready.add(rank)
            if len(self._ready) == self._world_size:
                log.info("%d workers wait ready for attempt %d", self._world_size, self.attempt)
        elif "why" in message:
            log.warning("worker %d cannot wait ready: %s", rank, message["why"])
            self._is_broken = True

    def can_go(self, attempt: int, hosts: Sequence[str]) -> bool:
        """Whether it can take the place of a fresh start: each of its workers is there.

        They need not be ready: those that still import began earlier than fresh ones would.
        """
        fits = (self.attempt, self.hosts) == (attempt, list(hosts))
        return fits and not self._is_broken and self._lines.on_the_line(self.attempt) == self._world_size

    def go(self, variables: Mapping[str, str], emit: Emit) -> Step | None:
        """Have the workers begin, with these variables besides their own. Events come through `emit` then.

        Returns None where one of them could not be told; then nothing is left of any.
        """
        told = self._lines.tell(self.attempt, {"go": dict(variables)})
        with self._lock:
            if told < self._world_size:
                self._is_broken = True
            else:
                self._emit = emit
        if self._is_broken:
            log.warning("attempt %d: one of the workers that waited is gone", self.attempt)
            self.close()
            return None
        log.info("attempt %d: %d workers that waited begin", self.attempt, told)
        return self._step

    def close(self) -> None:
        """End it. Waits, for a bounded time, until nothing is left."""
        self._step.close()

    def _note(self, event: Event) -> None:
        with self._lock:
            emit = self._emit
            if emit is None:
                self._is_broken = True
        if emit is not None:
            emit(event)
