"""Start the daemons of a sandbox (munged, slurmctld, and one slurmd per node), and kill its processes."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.errors import SchedulerError
from hpctrain.sandbox.layout import SandboxLayout, conf_path

#: User created by the munge packages: munged does not require root.
MUNGE_USER = "munge"

#: Set for every daemon and its children: the sandbox's folder, and for a slurmd also the node.
SANDBOX_VARIABLE = "HPCTRAIN_SANDBOX"
NODE_VARIABLE = "HPCTRAIN_SANDBOX_NODE"

_START_LIMIT_S = 30.0


@dataclass(frozen=True)
class Daemon:
    """A background program, identified by its command line, which contains the path of its sandbox."""

    label: str
    argv: tuple[str, ...]
    log: Path
    environ: Mapping[str, str]
    user: str | None = None
    node: str | None = None
    #: Command that prepares the environment and then replaces itself with the program.
    launcher: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        if self.user is None:
            return (*self.launcher, *self.argv)
        # Only root can run a launcher, so the user changes afterwards.
        user = ("setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups")
        return (*self.launcher, *user, *self.argv)

    def start(self) -> None:
        try:
            done = subprocess.run(
                self.command,
                env=dict(self.environ),
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_START_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise SchedulerError(
                f"{self.label} did not start within {_START_LIMIT_S:.0f} s{self.log_tail()}"
            ) from None
        if done.returncode:
            output = " ".join((done.stderr or done.stdout).split())
            reason = f": {output}" if output else self.log_tail()
            raise SchedulerError(f"{self.label} did not start (exit code {done.returncode}){reason}")

    def log_tail(self) -> str:
        """Return the end of the log, as a clause to append to a message."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return f"; its log {self.log} cannot be read"
        fatal = [line for line in lines if "fatal:" in line.lower()]
        return f"; last lines of {self.log}:\n  " + "\n  ".join((fatal or lines)[-3:])


def daemon_environ(plan: SandboxLayout) -> dict[str, str]:
    return {
        "PATH": plan.search_path,
        "LC_ALL": "C.UTF-8",
        "SLURM_CONF": str(plan.conf),
        SANDBOX_VARIABLE: str(plan.folder),
    }


def daemons(plan: SandboxLayout) -> list[Daemon]:
    environ = daemon_environ(plan)
    files = (f"--{name}-file={plan.munge / name}" for name in ("key", "seed", "pid", "log"))
    munged = ("munged", f"--socket={plan.munge_socket}", *files)
    slurmctld = ("slurmctld", "-f", str(plan.conf))
    launcher = (str(plan.launcher),) if plan.launcher.exists() else ()
    return [
        Daemon("munged", munged, plan.munge / "log", environ, user=MUNGE_USER, launcher=launcher),
        Daemon("slurmctld", slurmctld, plan.logs / "slurmctld.log", environ, launcher=launcher),
        *(
            Daemon(
                f"slurmd {node}",
                ("slurmd", "-f", str(plan.conf), "-N", node),
                plan.logs / f"slurmd-{node}.log",
                {**environ, NODE_VARIABLE: node},
                node=node,
                launcher=launcher,
            )
            for node in plan.nodes
        ),
    ]


def belongs_to_sandbox(folder: Path, process: ProcessInfo, node: str | None = None) -> bool:
    """True if a process is a daemon of the sandbox in `folder`, or runs in a job; `node` selects one node."""
    environ = process.environ
    if environ.get(SANDBOX_VARIABLE) == str(folder):
        return node is None or environ.get(NODE_VARIABLE) == node
    if environ.get("SLURM_CONF") == str(conf_path(folder)):
        # A user's shell with SLURM_CONF has no node.
        host = environ.get("SLURMD_NODENAME", "")
        return host == node if node else host.startswith(f"{folder.name}-")
    return False


def kill_all(is_target: Callable[[ProcessInfo], bool], scope: str, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while victims := with_descendants(is_target, processes()):
        if time.monotonic() > deadline:
            pids = ", ".join(str(victim.pid) for victim in victims)
            raise SchedulerError(
                f"{scope}: these processes are still running {limit_s:.0f} s after SIGKILL: {pids}. Inspect "
                "them with ps."
            )
        # All at the same time, as in a power failure: no parent sees and reports the end of a child.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for victim in victims:
                victim.signal(number)
        time.sleep(0.02)


def with_descendants(
    is_target: Callable[[ProcessInfo], bool], candidates: Iterable[ProcessInfo]
) -> list[ProcessInfo]:
    children: dict[int, list[ProcessInfo]] = {}
    for process in candidates:
        children.setdefault(process.parent, []).append(process)
    chosen: dict[int, ProcessInfo] = {}
    pending = [process for siblings in children.values() for process in siblings if is_target(process)]
    while pending:
        process = pending.pop()
        if process.pid not in chosen:
            chosen[process.pid] = process
            pending.extend(children.get(process.pid, ()))
    return list(chosen.values())
