"""The process of a Slurm job's batch script: it starts the supervisor, and again where it is killed.

A supervisor that is killed from outside, by the kernel for want of memory perhaps, would take the job with
it. So it is a child of a process that does nothing but wait. Where that one is killed in its place, the job
ends: then the supervisor has the time that Slurm leaves it to put the job back into the queue.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType

#: How often a supervisor may be killed in one job.
_MOST_DEATHS = 3
#: prctl(2): the signal that the kernel sends when the parent dies.
_PR_SET_PDEATHSIG = 1
#: What tells a supervisor that its guardian is gone.
ORPHANED = signal.SIGHUP


def become_supervisor(environ: Mapping[str, str]) -> int:
    """Go on as the supervisor, in a process of its own under Slurm. Returns how many were killed before it.

    In the process that called it this returns only where there is no Slurm: it waits, hands the signals on
    that it gets, and exits as the last supervisor did.
    """
    if "SLURM_JOB_ID" not in environ or sys.platform != "linux":
        return 0
    for deaths in range(_MOST_DEATHS + 1):
        guardian = os.getpid()
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ORPHANED)
            if os.getppid() != guardian:
                os.kill(os.getpid(), ORPHANED)
            return deaths
        told = _Handed(child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0 or told.signals:
            break
        print(f"hpctrain: the supervisor was ended by {signal.Signals(-code).name}.", flush=True)
    sys.exit(code if code >= 0 else 128 - code)


class _Handed:
    """Hands signals on to a child, and keeps them in mind."""

    def __init__(self, child: int) -> None:
        self._child = child
        self.signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hand_on)

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
        os.kill(self._child, number)
