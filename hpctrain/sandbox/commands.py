"""Slurm commands for a sandbox."""

from __future__ import annotations

import subprocess
import time

from hpctrain.errors import SchedulerError
from hpctrain.sandbox.layout import SandboxLayout

#: Maximum seconds for jobs to end before their processes are killed.
_CANCEL_LIMIT_S = 8.0


def run_command(plan: SandboxLayout, *argv: str, limit_s: float = 20.0) -> str:
    """Return the output of a Slurm command that uses the sandbox; its times are UTC.

    Raises:
        SchedulerError: it failed, or took longer than `limit_s` seconds.
    """
    environ = {"PATH": plan.search_path, "LC_ALL": "C.UTF-8", "TZ": "UTC", "SLURM_CONF": str(plan.conf)}
    try:
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        raise SchedulerError(
            f"Sandbox {plan.name}: {argv[0]} did not finish within {limit_s:.0f} s"
        ) from None
    if done.returncode:
        raise SchedulerError(f"Sandbox {plan.name}: {argv[0]} failed: {' '.join(done.stderr.split())}")
    return done.stdout


def node_states(plan: SandboxLayout) -> dict[str, str]:
    """Return the state of each node as Slurm prints it, such as `idle`, `allocated` or `down*`.

    Raises:
        SchedulerError: the controller does not respond.
    """
    words = run_command(
        plan, "sinfo", "--noheader", "--Node", "--partition=preemptible", "--format=%N %T"
    ).split()
    return dict(zip(words[::2], words[1::2], strict=True))


def is_registered(plan: SandboxLayout) -> bool:
    """True if the controller is registered with slurmdbd, which then accepts its records.

    Raises:
        SchedulerError: slurmdbd does not respond.
    """
    command = ("sacctmgr", "--noheader", "--parsable2", "list", "cluster", plan.name, "format=ControlPort")
    return run_command(plan, *command).strip() == str(plan.port)


def jobs(plan: SandboxLayout) -> list[str]:
    """Return the ids of pending, running and completing jobs."""
    return run_command(plan, "squeue", "--noheader", "--all", "--format=%A").split()


def cancel_jobs(plan: SandboxLayout) -> None:
    """Cancel all jobs, and wait a few seconds for them to end."""
    waiting = jobs(plan)
    if waiting:
        run_command(plan, "scancel", "--quiet", *waiting)
    deadline = time.monotonic() + _CANCEL_LIMIT_S
    while waiting and time.monotonic() < deadline:
        time.sleep(0.1)
        waiting = jobs(plan)
