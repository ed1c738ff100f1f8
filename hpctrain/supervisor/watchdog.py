"""Parent process of the supervisor in a Slurm job, which restarts a killed supervisor.

If the supervisor were the main process, killing it (such as by the OOM killer) would end the job. The
supervisor therefore runs as the child of a process that only waits. If that parent is killed instead, the job
ends. The supervisor then uses the remaining time to requeue the job.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType

from hpctrain import system
from hpctrain.cluster.parent_death import die_with_parent
from hpctrain.text import signal_name

#: Maximum number of killed supervisors in a job.
_MAX_DEATHS = 3
#: Signal that notifies a supervisor of the exit of its parent.
ORPHANED_SIGNAL = signal.SIGHUP


def run_under_watchdog(environ: Mapping[str, str]) -> int:
    """Fork and continue in the child as the supervisor. Returns the number of killed earlier supervisors.

    Under Slurm, the calling process never returns: it waits, forwards signals, and exits with the status of
    the last supervisor. Without Slurm, nothing is forked.
    """
    if "SLURM_JOB_ID" not in environ or sys.platform != "linux":
        return 0
    for deaths in range(_MAX_DEATHS + 1):
        guardian = system.getpid()
        child = os.fork()
        if child == 0:
            die_with_parent(ORPHANED_SIGNAL)
            if os.getppid() != guardian:
                os.kill(system.getpid(), ORPHANED_SIGNAL)
            return deaths
        told = _SignalForwarder(child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0 or told.signals:
            break
        then = "restarting it" if deaths < _MAX_DEATHS else "this job exits"
        print(f"hpctrain: the supervisor was killed by {signal_name(-code)}; {then}.", flush=True)
    sys.exit(code if code >= 0 else 128 - code)


class _SignalForwarder:
    """Forwards signals to a child and records them."""

    def __init__(self, child: int) -> None:
        self._child = child
        self.signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            system.handle_signal(number, self._forward)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
        os.kill(self._child, number)
