"""Slurm's own commands, spoken to one sandbox."""

from __future__ import annotations

import subprocess
import time

from hpctrain.errors import SchedulerError
from hpctrain.sandbox.config import KILL_WAIT_S
from hpctrain.sandbox.plan import Plan
from hpctrain.sandbox.requirements import SEARCH_PATH


def run(plan: Plan, *argv: str, limit_s: float = 20.0) -> str:
    """The output of a Slurm command that talks to the sandbox; its times are UTC.

    Raises:
        SchedulerError: it failed, or took longer than `limit_s` seconds.
    """
    environ = {"PATH": SEARCH_PATH, "LC_ALL": "C.UTF-8", "TZ": "UTC", "SLURM_CONF": str(plan.conf)}
    try:
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"sandbox {plan.name}: no answer to {argv[0]} within {limit_s:.0f} s") from None
    if done.returncode:
        raise SchedulerError(f"sandbox {plan.name}: {argv[0]} failed: {' '.join(done.stderr.split())}")
    return done.stdout


def node_states(plan: Plan) -> dict[str, str]:
    """The state of each node in Slurm's words, such as `idle`, `allocated` or `down*`.

    Raises:
        SchedulerError: the controller does not answer.
    """
    words = run(plan, "sinfo", "--noheader", "--Node", "--partition=preemptible", "--format=%N %T").split()
    return dict(zip(words[::2], words[1::2], strict=True))


def is_registered(plan: Plan) -> bool:
    """Whether slurmdbd knows where the controller listens, so that it takes its records.

    Raises:
        SchedulerError: slurmdbd does not answer.
    """
    command = ("sacctmgr", "--noheader", "--parsable2", "list", "cluster", plan.name, "format=ControlPort")
    return run(plan, *command).strip() == str(plan.port)


def jobs(plan: Plan) -> list[str]:
    """Ids of the jobs that wait, run or are being cleaned up after."""
    return run(plan, "squeue", "--noheader", "--all", "--format=%A").split()


def cancel_jobs(plan: Plan) -> None:
    """Cancel all jobs and give them the time to end that Slurm gives a job."""
    waiting = jobs(plan)
    if waiting:
        run(plan, "scancel", "--quiet", *waiting)
    deadline = time.monotonic() + KILL_WAIT_S + 3
    while waiting and time.monotonic() < deadline:
        time.sleep(0.1)
        waiting = jobs(plan)
