"""The daemons of a sandbox: munged, slurmctld, one slurmd per node, and two daemons for accounting."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.errors import SchedulerError
from hpctrain.sandbox.accounting import MARIADB_USER, SOCKET_VARIABLE, mariadbd_argv
from hpctrain.sandbox.layout import SandboxLayout, conf_path

#: Set for every daemon and its children: the sandbox's folder, and for a slurmd also the node.
SANDBOX_VARIABLE = "HPCTRAIN_SANDBOX"
NODE_VARIABLE = "HPCTRAIN_SANDBOX_NODE"

#: User created by the munge packages: munged does not require root.
MUNGE_USER = "munge"

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
    #: True if the program neither daemonizes nor opens its log itself.
    stays_in_front: bool = False
    #: Socket or port of the running daemon, if the next daemon depends on it.
    address: Path | int | None = None
    #: Command that prepares the environment and then replaces itself with the program.
    launcher: tuple[str, ...] = ()

    def start(self) -> None:
        """Start the program in the background; with an address, wait until it accepts connections.

        Raises:
            SchedulerError: the program exited with an error, or does not accept connections.
        """
        output: AbstractContextManager[int | IO[bytes]] = nullcontext(subprocess.PIPE)
        launcher = self.launcher
        if self.user is not None:
            # Only root can run a launcher, so the user changes afterwards.
            launcher += ("setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups")
        if self.stays_in_front:
            output, launcher = open(self.log, "ab"), ("setsid", "--fork", *launcher)
        try:
            with output as out:
                done = subprocess.run(
                    (*launcher, *self.argv),
                    env=dict(self.environ),
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    text=True,
                    errors="replace",
                    timeout=_START_LIMIT_S,
                )
        except subprocess.TimeoutExpired:
            raise SchedulerError(self._too_late()) from None
        if done.returncode:
            words = " ".join((done.stderr or done.stdout or "").split())
            why = f": {words}" if words else self.log_tail()
            raise SchedulerError(f"{self.label} did not start (exit code {done.returncode}){why}")
        if self.address is not None:
            self._wait_for_answer(self.address)

    def _wait_for_answer(self, address: Path | int) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while not _answers(address):
            # The command line of the launcher ends with the same words.
            if not any(process.argv[-len(self.argv) :] == self.argv for process in processes()):
                raise SchedulerError(f"{self.label} exited{self.log_tail()}")
            if time.monotonic() > deadline:
                raise SchedulerError(self._too_late())
            time.sleep(0.02)

    def _too_late(self) -> str:
        return f"{self.label} did not start within {_START_LIMIT_S:.0f} s{self.log_tail()}"

    def is_process(self, process: ProcessInfo) -> bool:
        return process.argv == self.argv

    def log_tail(self) -> str:
        """Return the end of the log, as a clause to append to a message."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return f"; its log {self.log} cannot be read"
        fatal = [line for line in lines if "fatal:" in line.lower()]
        return f"; last lines of {self.log}:\n  " + "\n  ".join((fatal or lines)[-3:])


def daemons(plan: SandboxLayout) -> list[Daemon]:
    """Return all daemons of a sandbox, in start order."""
    environ = {
        "PATH": plan.search_path,
        "LC_ALL": "C.UTF-8",
        "SLURM_CONF": str(plan.conf),
        SANDBOX_VARIABLE: str(plan.folder),
    }
    munged = (
        "munged",
        f"--socket={plan.munge_socket}",
        f"--key-file={plan.munge / 'key'}",
        f"--seed-file={plan.munge / 'seed'}",
        f"--pid-file={plan.munge / 'pid'}",
        f"--log-file={plan.munge / 'log'}",
    )
    slurmctld = ("slurmctld", "-f", str(plan.conf))
    launcher = (str(plan.launcher),) if plan.shape.slurm else ()
    return [
        Daemon("munged", munged, plan.munge / "log", environ, user=MUNGE_USER, launcher=launcher),
        *(_accounting_daemons(plan, environ, launcher) if plan.shape.accounting else ()),
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


def _accounting_daemons(
    plan: SandboxLayout, environ: Mapping[str, str], launcher: tuple[str, ...]
) -> list[Daemon]:
    return [
        Daemon(
            "mariadbd",
            mariadbd_argv(plan),
            plan.accounting / "mariadbd.log",
            environ,
            user=MARIADB_USER,
            stays_in_front=True,
            address=plan.database_socket,
        ),
        Daemon(
            "slurmdbd",
            # The argument only identifies the process: slurmdbd reads its configuration from the folder of
            # SLURM_CONF.
            ("slurmdbd", str(plan.slurmdbd_conf)),
            plan.slurmdbd_log,
            {**environ, SOCKET_VARIABLE: str(plan.database_socket)},
            address=plan.slurmdbd_port,
            launcher=launcher,
        ),
    ]


def _answers(address: Path | int) -> bool:
    """True if a Unix socket, or a port of this host, accepts connections."""
    family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
    with socket.socket(family) as probe:
        target = str(address) if isinstance(address, Path) else ("127.0.0.1", address)
        return probe.connect_ex(target) == 0


def belongs_to_sandbox(folder: Path, process: ProcessInfo, node: str | None = None) -> bool:
    """True if a process is a daemon of the sandbox in `folder` or runs in one of its jobs.

    With `node`, only processes of that node count. A user's shell with SLURM_CONF does not count: only
    processes started by Slurm on a node have the node's name.
    """
    environ = process.environ
    if environ.get(SANDBOX_VARIABLE) == str(folder):
        return node is None or environ.get(NODE_VARIABLE) == node
    if environ.get("SLURM_CONF") == str(conf_path(folder)):
        where = environ.get("SLURMD_NODENAME", "")
        return where == node if node else where.startswith(f"{folder.name}-")
    return False
