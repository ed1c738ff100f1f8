"""Processes that an earlier attempt left behind on this host: daemons, data workers, what left its session.

They would hold GPUs, ports and files. Where Slurm keeps the tasks of a step in a control group it ends them
itself; elsewhere what has left its session escapes it. Each is known by the variables that its rank handed
down.
"""

from __future__ import annotations

import signal
import time

from hpctrain.cluster.own_processes import own_processes
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE

#: A process that was killed is gone at once, unless the kernel holds it.
_LIMIT_S = 5.0


def end_leftovers(run_dir: str, before: int) -> list[int]:
    """Kill what is left here of attempts before `before`, and return the numbers of these processes.

    Args:
        run_dir: the folder of the run, as its ranks were told it.
        before: the first attempt that is left alone.
    """
    found: list[int] = []
    deadline = time.monotonic() + _LIMIT_S
    # What is about to start another process may do so before it is killed.
    while (left := _kill(run_dir, before)) and time.monotonic() < deadline:
        found += [pid for pid in left if pid not in found]
        time.sleep(0.01)
    return found


def _kill(run_dir: str, before: int) -> list[int]:
    return [
        process.pid
        for process in own_processes()
        if process.environ.get(RUN_DIR_VARIABLE) == run_dir
        and (attempt := process.environ.get(ATTEMPT_VARIABLE, "")).isdigit()
        and int(attempt) < before
        and process.signal(signal.SIGKILL)
    ]
