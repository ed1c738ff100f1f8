"""Taking a sandbox away, whatever state it is in."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from hpctrain.errors import SchedulerError, UserError
from hpctrain.sandbox import hosts
from hpctrain.sandbox.commands import cancel_jobs
from hpctrain.sandbox.daemons import belongs, daemons
from hpctrain.sandbox.lock import locked
from hpctrain.sandbox.plan import ROOT, Plan, folder_of
from hpctrain.sandbox.processes import Process, end_all, processes, with_descendants
from hpctrain.sandbox.requirements import require


def down(name: str = "default") -> bool:
    """Cancel the jobs of a sandbox, end its processes, and remove its devices, host lines and folder.

    A sandbox that crashed, or came up only in part, is removed too. Returns whether there was one.

    Raises:
        UserError: called from inside a job of that sandbox, or this is not root on Linux with Slurm.
        SchedulerError: a process does not end.
    """
    folder = folder_of(name)
    require()
    with locked(ROOT):
        was_there = folder.exists()
        remove(folder)
    return was_there


def remove(folder: Path, *, came_up: bool = True) -> None:
    """Remove the sandbox in `folder`, or what is left of one. The caller holds the lock.

    One that never came up has no jobs to cancel, and maybe no controller that answers.
    """

    def ours(process: Process) -> bool:
        return belongs(folder, process)

    running = processes()
    if any(process.pid == os.getpid() for process in with_descendants(ours, running)):
        raise UserError(f"this process runs in a job of sandbox {folder.name}: take that down from outside")
    plan = Plan.load(folder)
    if came_up and plan is not None and _controller_runs(plan, running):
        # A controller that is stuck must not keep its sandbox from going.
        with suppress(SchedulerError):
            cancel_jobs(plan)
    end_all(ours, f"sandbox {folder.name}")
    hosts.remove(folder.name)
    if folder.exists():
        shutil.rmtree(folder)


def _controller_runs(plan: Plan, running: list[Process]) -> bool:
    controller = next(daemon for daemon in daemons(plan) if daemon.label == "slurmctld")
    return any(controller.is_process(process) for process in running)
