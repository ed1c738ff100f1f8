"""A step beside the training: one process a rank on the same nodes, which ends by itself."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Mapping

from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from hpctrain.supervisor.rendezvous import Rendezvous
from hpctrain.supervisor.step import Event, Launcher, StepEnded

log = logging.getLogger(__name__)


def run_side_step(
    run: RunDir,
    launcher: Launcher,
    command: list[str],
    attempt: int,
    *,
    limit_s: float,
    what: str,
    variables: Mapping[str, str] | None = None,
) -> StepEnded | None:
    """Run a step that meets at a store of its own, and wait for its end.

    Args:
        run: of which folder each process is told.
        launcher: starts it.
        command: what each process runs.
        attempt: the number that it carries.
        limit_s: it is ended after so many seconds.
        what: what it does, for the log.
        variables: what else each process is told.

    Returns:
        How it ended; None where it had to be ended.
    """
    deadline = time.monotonic() + limit_s
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with Rendezvous(launcher.address) as rendezvous:
        told = {
            **rendezvous.variables,
            RUN_DIR_VARIABLE: str(run.path),
            ATTEMPT_VARIABLE: str(attempt),
            **(variables or {}),
        }
        step = launcher.start(command, told, events.put)
        try:
            rendezvous.serve()
            while True:
                try:
                    event = events.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    log.warning("done waiting for %s after %.0f s", what, limit_s)
                    return None
                if isinstance(event, StepEnded):
                    return event
        finally:
            step.close()
