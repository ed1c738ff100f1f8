"""Removal of a sandbox in any state."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.errors import SchedulerError, UserError
from hpctrain.sandbox import etc_hosts
from hpctrain.sandbox.commands import cancel_jobs
from hpctrain.sandbox.daemons import belongs_to_sandbox, daemons
from hpctrain.sandbox.layout import ROOT, SandboxLayout, folder_of
from hpctrain.sandbox.lock import sandbox_lock
from hpctrain.sandbox.processes import kill_all, with_descendants
from hpctrain.sandbox.requirements import check_requirements


def down(name: str = "default") -> bool:
    """Cancel the jobs of a sandbox, kill its processes, and remove its devices, host lines and folder.

    Crashed or incomplete sandboxes are also removed. Returns True if the sandbox existed.

    Raises:
        UserError: called from a job of that sandbox, or not as root on Linux with Slurm.
        SchedulerError: a process does not end.
    """
    folder = folder_of(name)
    plan = SandboxLayout.load(folder)
    check_requirements(slurm=plan.shape.slurm if plan else "")
    with sandbox_lock(ROOT):
        was_there = folder.exists()
        remove(folder)
    return was_there


def remove(folder: Path, *, came_up: bool = True) -> None:
    """Remove the sandbox in `folder`, even an incomplete one. The caller holds the lock.

    A sandbox that was never up has no jobs to cancel, and its controller may not respond.
    """

    def ours(process: ProcessInfo) -> bool:
        return belongs_to_sandbox(folder, process)

    running = processes()
    if any(process.pid == os.getpid() for process in with_descendants(ours, running)):
        raise UserError(
            f"This process runs in a job of sandbox {folder.name}, so it would be killed with the "
            "sandbox. Run this command outside the sandbox."
        )
    plan = SandboxLayout.load(folder)
    if came_up and plan is not None and _controller_runs(plan, running):
        # A hanging controller must not prevent the removal.
        with suppress(SchedulerError):
            cancel_jobs(plan)
    kill_all(ours, f"sandbox {folder.name}")
    etc_hosts.remove_hosts(folder.name)
    if folder.exists():
        shutil.rmtree(folder)


def _controller_runs(plan: SandboxLayout, running: list[ProcessInfo]) -> bool:
    controller = next(daemon for daemon in daemons(plan) if daemon.label == "slurmctld")
    return any(controller.is_process(process) for process in running)
