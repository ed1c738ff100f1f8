"""Kill what earlier attempts left running on this host."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping

from hpctrain.cluster.processes import processes
from hpctrain.rundir import ATTEMPT_VARIABLE, CHILD_VARIABLE, RUN_DIR_VARIABLE
from hpctrain.text import is_count

#: A killed process ends immediately unless the kernel blocks it.
_ORPHANS_LIMIT_S = 5.0


def kill_orphans(run_dir: str, before: int = sys.maxsize) -> list[int]:
    """Kill the processes of attempts before `before` on this host, and return their pids.

    Slurm ends daemons and data workers only if it keeps the tasks of a step in a control group.
    """
    killed: list[int] = []
    deadline = time.monotonic() + _ORPHANS_LIMIT_S
    # A process may start another process before it is killed, so search again.
    while (pids := _kill_once(run_dir, before)) and time.monotonic() < deadline:
        killed += [pid for pid in pids if pid not in killed]
        time.sleep(0.01)
    return killed


def _kill_once(run_dir: str, before: int) -> list[int]:
    return [
        process.pid
        for process in processes(os.geteuid())
        if process.environ.get(RUN_DIR_VARIABLE) == run_dir
        and is_count(attempt := process.environ.get(ATTEMPT_VARIABLE, ""))
        and int(attempt) < before
        and not _is_of_other_job(process.environ)
        and process.signal(signal.SIGKILL)
    ]


def _is_of_other_job(environ: Mapping[str, str]) -> bool:
    """True for a process of a job that a batch script has submitted, which inherits its variables."""
    try:
        job = json.loads(environ.get(CHILD_VARIABLE, "{}")).get("job")
    except ValueError:
        return False
    return job is not None and environ.get("SLURM_JOB_ID") != job
