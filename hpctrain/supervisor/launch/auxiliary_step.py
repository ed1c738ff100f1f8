"""Auxiliary step outside training: one process per rank on the same nodes, which exits by itself."""

from __future__ import annotations

import logging
import queue

from hpctrain import system
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from hpctrain.supervisor.launch.job_step import Launcher, StepEnded, StepEvent
from hpctrain.supervisor.launch.rendezvous_store import RendezvousStore

log = logging.getLogger(__name__)


def run_auxiliary_step(
    run: RunDir,
    launcher: Launcher,
    command: list[str],
    attempt: int,
    *,
    limit_s: float,
    what: str,
    uses_store: bool = True,
) -> StepEnded | None:
    """Run a step with a separate rendezvous store, and wait for its end."""
    deadline = system.monotonic() + limit_s
    events: system.SimpleQueue[StepEvent] = system.SimpleQueue()
    with RendezvousStore(launcher.address, hosted=uses_store) as rendezvous:
        told = {
            **rendezvous.variables,
            RUN_DIR_VARIABLE: str(run.path),
            ATTEMPT_VARIABLE: str(attempt),
        }
        step = launcher.start(command, told, events.put)
        try:
            rendezvous.serve()
            while True:
                try:
                    event = events.get(timeout=max(0.0, deadline - system.monotonic()))
                except queue.Empty:
                    log.warning("timed out after %.0f s waiting for %s", limit_s, what)
                    return None
                if isinstance(event, StepEnded):
                    return event
        finally:
            step.close()
