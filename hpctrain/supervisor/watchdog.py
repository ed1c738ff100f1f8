"""Restart a killed supervisor of a Slurm job from its parent process.

The supervisor is the child of a process that only waits, so that the OOM killer does not end the job with it.
If that parent is killed instead, the job ends, and the supervisor uses the remaining time to requeue the job.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType

from hpctrain import system
from hpctrain.cluster.processes import die_with_parent
from hpctrain.text import signal_name

#: Maximum number of killed supervisors in a job.
_MAX_DEATHS = 3
#: Signal that notifies a supervisor of the exit of its parent.
ORPHANED_SIGNAL = signal.SIGHUP


def run_under_watchdog(environ: Mapping[str, str]) -> int:
    """Fork, and continue in the child as the supervisor; returns the number of killed earlier supervisors."""
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
        signals = _forward_signals(child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0 or signals:
            break
        consequence = "restarting it" if deaths < _MAX_DEATHS else "this job exits"
        print(f"hpctrain: the supervisor was killed by {signal_name(-code)}; {consequence}.", flush=True)
    sys.exit(code if code >= 0 else 128 - code)


def _forward_signals(child: int) -> list[int]:
    """Forward signals to a child from now on; returns a list that records them."""
    signals: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            signals.append(number)
        os.kill(child, number)

    # Slurm sends user signals to this process only for an adopted batch script.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        system.handle_signal(number, forward)
    return signals
