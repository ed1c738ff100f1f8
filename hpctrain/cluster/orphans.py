"""Processes left on this host by an earlier attempt: daemons, data workers, processes outside its session.

These processes would hold GPUs, ports and files. Slurm ends them if it keeps the tasks of a step in a control
group. Otherwise, processes outside the session survive. They are detected by the variables inherited from
their rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from hpctrain.cluster.processes import processes
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from hpctrain.text import is_count

#: A killed process ends immediately unless the kernel blocks it.
_LIMIT_S = 5.0


def kill_orphans(run_dir: str, before: int = sys.maxsize) -> list[int]:
    """Kill the processes of attempts before `before` on this host, and return their pids."""
    found: list[int] = []
    deadline = time.monotonic() + _LIMIT_S
    # A process may start another process before it is killed, so search again.
    while (left := _kill(run_dir, before)) and time.monotonic() < deadline:
        found += [pid for pid in left if pid not in found]
        time.sleep(0.01)
    return found


def _kill(run_dir: str, before: int) -> list[int]:
    return [
        process.pid
        for process in processes(os.geteuid())
        if process.environ.get(RUN_DIR_VARIABLE) == run_dir
        and is_count(attempt := process.environ.get(ATTEMPT_VARIABLE, ""))
        and int(attempt) < before
        and process.signal(signal.SIGKILL)
    ]
