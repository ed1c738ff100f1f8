"""Recognize and kill the processes of a sandbox."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.errors import SchedulerError
from hpctrain.sandbox.layout import conf_path

#: Set for every daemon and its children: the sandbox's folder, and for a slurmd also the node.
SANDBOX_VARIABLE = "HPCTRAIN_SANDBOX"
NODE_VARIABLE = "HPCTRAIN_SANDBOX_NODE"


def belongs_to_sandbox(folder: Path, process: ProcessInfo, node: str | None = None) -> bool:
    """True if a process is a daemon of the sandbox in `folder` or runs in one of its jobs.

    With `node`, only processes of that node count. A user's shell with SLURM_CONF does not count: only
    processes started by Slurm on a node have the node's name.
    """
    environ = process.environ
    if environ.get(SANDBOX_VARIABLE) == str(folder):
        return node is None or environ.get(NODE_VARIABLE) == node
    if environ.get("SLURM_CONF") == str(conf_path(folder)):
        host = environ.get("SLURMD_NODENAME", "")
        return host == node if node else host.startswith(f"{folder.name}-")
    return False


def kill_all(wanted: Callable[[ProcessInfo], bool], what: str, limit_s: float = 10.0) -> None:
    """Kill the processes that are `wanted` and all their descendants, until none is left."""
    deadline = time.monotonic() + limit_s
    while victims := with_descendants(wanted, processes()):
        if time.monotonic() > deadline:
            pids = ", ".join(str(victim.pid) for victim in victims)
            raise SchedulerError(
                f"{what}: these processes are still running {limit_s:.0f} s after SIGKILL: {pids}. Inspect "
                "them with ps."
            )
        # All at the same time, as in a power failure: no parent sees and reports the end of a child.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for victim in victims:
                victim.signal(number)
        time.sleep(0.02)


def with_descendants(
    wanted: Callable[[ProcessInfo], bool], among: Iterable[ProcessInfo]
) -> list[ProcessInfo]:
    """Return the wanted processes of `among` and all their descendants."""
    children: dict[int, list[ProcessInfo]] = {}
    for process in among:
        children.setdefault(process.parent, []).append(process)
    chosen: dict[int, ProcessInfo] = {}
    pending = [process for siblings in children.values() for process in siblings if wanted(process)]
    while pending:
        process = pending.pop()
        if process.pid not in chosen:
            chosen[process.pid] = process
            pending.extend(children.get(process.pid, ()))
    return list(chosen.values())
