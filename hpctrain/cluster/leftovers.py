"""Processes that an earlier attempt left behind on this host: daemons, data workers, what left its session.

They would hold GPUs, ports and files. Where Slurm keeps the tasks of a step in a control group it ends them
itself; elsewhere what has left its session escapes it. Each is known by the variables that its rank handed
down.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

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
    while (left := [pid for pid in _own_processes() if _kill_leftover(pid, run_dir, before)]) and (
        time.monotonic() < deadline
    ):
        found += [pid for pid in left if pid not in found]
        time.sleep(0.01)
    return found


def _own_processes() -> list[int]:
    """Processes of this user, but for this one; none where there is no /proc to ask."""
    found = []
    with suppress(FileNotFoundError):
        for entry in os.scandir("/proc"):
            if entry.name.isdecimal():
                with suppress(FileNotFoundError, ProcessLookupError):
                    if entry.stat().st_uid == os.geteuid() and int(entry.name) != os.getpid():
                        found.append(int(entry.name))
    return found


def _kill_leftover(pid: int, run_dir: str, before: int) -> bool:
    """Kill the process where it is of an earlier attempt, and tell whether it is."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # Read after the handle was taken: what is killed is the process that was looked at.
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        variables = dict(word.partition(b"=")[::2] for word in words)
        attempt = variables.get(ATTEMPT_VARIABLE.encode(), b"")
        if variables.get(RUN_DIR_VARIABLE.encode()) != os.fsencode(run_dir) or not attempt.isdigit():
            return False
        if int(attempt) >= before:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except (OSError, ProcessLookupError):
        return False
    finally:
        os.close(handle)
