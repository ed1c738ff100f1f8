"""The processes of a run."""

import os
import time
from pathlib import Path

from helpers.waiting import deadline_in
from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.rundir import RUN_DIR_VARIABLE


def run_processes(run_dir: Path) -> list[ProcessInfo]:
    """Return the processes of a run: ranks and their children, the supervisor and its children.

    They have HPCTRAIN_RUN_DIR, or the run's folder as an argument.
    """
    names = {str(run_dir), str(run_dir.resolve())}
    return [
        process
        for process in processes()
        if process.pid != os.getpid()
        and (process.environ.get(RUN_DIR_VARIABLE) in names or names.intersection(process.argv))
    ]


def assert_no_process_left(run_dir: Path, timeout: float = 10.0) -> None:
    deadline = deadline_in(timeout)
    while remaining := run_processes(run_dir):
        if time.monotonic() > deadline:
            lines = "\n".join(f"{process.pid}: {' '.join(process.argv)}" for process in remaining)
            raise AssertionError(f"processes of {run_dir} are left after {timeout} s:\n{lines}")
        time.sleep(0.05)
