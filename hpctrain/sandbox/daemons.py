"""The daemons of a sandbox: munged, one slurmctld, one slurmd a node; with accounting two more."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hpctrain.errors import SchedulerError
from hpctrain.sandbox.accounting import ACCOUNTING_USER, SOCKET_VARIABLE, mariadbd_argv
from hpctrain.sandbox.plan import Plan, conf_of
from hpctrain.sandbox.processes import Process, processes
from hpctrain.sandbox.requirements import SEARCH_PATH

#: In the environment of every daemon and what it forks: the sandbox's folder, and the node for a slurmd.
MARK = "HPCTRAIN_SANDBOX"
NODE_MARK = "HPCTRAIN_SANDBOX_NODE"

#: The user that the munge packages make for their daemon, so that it need not be root.
MUNGE_USER = "munge"

_START_LIMIT_S = 30.0


@dataclass(frozen=True)
class Daemon:
    """One program that runs in the background; it is known by its command line, which names its sandbox."""

    label: str
    argv: tuple[str, ...]
    log: Path
    environ: Mapping[str, str]
    user: str | None = None
    node: str | None = None
    #: It does not go to the background by itself, nor open its log.
    stays_in_front: bool = False
    #: The socket or port on which it answers once it is up, where the next daemon needs that.
    address: Path | int | None = None

    def start(self) -> None:
        """Start it in the background, and wait until it answers where somebody needs that.

        Raises:
            SchedulerError: it said at once that it cannot run, or does not answer.
        """
        output: AbstractContextManager[int | IO[bytes]] = nullcontext(subprocess.PIPE)
        launcher: tuple[str, ...] = ()
        if self.stays_in_front:
            output, launcher = open(self.log, "ab"), ("setsid", "--fork")
        try:
            with output as out:
                done = subprocess.run(
                    (*launcher, *self.argv),
                    env=dict(self.environ),
                    user=self.user,
                    group=self.user,
                    extra_groups=None if self.user is None else [],
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
            why = f": {words}" if words else self.last_words()
            raise SchedulerError(f"{self.label} did not start, exit code {done.returncode}{why}")
        if self.address is not None:
            self._wait_for_answer(self.address)

    def _wait_for_answer(self, address: Path | int) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while not _answers(address):
            # What launches it has the same words at the end of its command line.
            if not any(process.argv[-len(self.argv) :] == self.argv for process in processes()):
                raise SchedulerError(f"{self.label} ended{self.last_words()}")
            if time.monotonic() > deadline:
                raise SchedulerError(self._too_late())
            time.sleep(0.02)

    def _too_late(self) -> str:
        return f"{self.label} did not start within {_START_LIMIT_S:.0f} s{self.last_words()}"

    def is_process(self, process: Process) -> bool:
        return process.argv == self.argv

    def last_words(self) -> str:
        """The end of its log, as a clause to put after a message."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return f"; it wrote no log to {self.log}"
        fatal = [line for line in lines if "fatal:" in line.lower()]
        return f"; its log {self.log} ends:\n  " + "\n  ".join((fatal or lines)[-3:])


def daemons(plan: Plan) -> list[Daemon]:
    """All daemons of a sandbox, in the order in which they have to start."""
    environ = {"PATH": SEARCH_PATH, "LC_ALL": "C.UTF-8", "SLURM_CONF": str(plan.conf), MARK: str(plan.folder)}
    munged = (
        "munged",
        f"--socket={plan.munge_socket}",
        f"--key-file={plan.munge / 'key'}",
        f"--seed-file={plan.munge / 'seed'}",
        f"--pid-file={plan.munge / 'pid'}",
        f"--log-file={plan.munge / 'log'}",
    )
    slurmctld = ("slurmctld", "-f", str(plan.conf))
    return [
        Daemon("munged", munged, plan.munge / "log", environ, user=MUNGE_USER),
        *(_accounting_daemons(plan, environ) if plan.shape.accounting else ()),
        Daemon("slurmctld", slurmctld, plan.logs / "slurmctld.log", environ),
        *(
            Daemon(
                f"slurmd {node}",
                ("slurmd", "-f", str(plan.conf), "-N", node),
                plan.logs / f"slurmd-{node}.log",
                {**environ, NODE_MARK: node},
                node=node,
            )
            for node in plan.nodes
        ),
    ]


def _accounting_daemons(plan: Plan, environ: Mapping[str, str]) -> list[Daemon]:
    return [
        Daemon(
            "mariadbd",
            mariadbd_argv(plan),
            plan.accounting / "mariadbd.log",
            environ,
            user=ACCOUNTING_USER,
            stays_in_front=True,
            address=plan.database_socket,
        ),
        Daemon(
            "slurmdbd",
            # The word, which it does not read, tells it from others: what it reads lies beside SLURM_CONF.
            ("slurmdbd", str(plan.slurmdbd_conf)),
            plan.slurmdbd_log,
            {**environ, SOCKET_VARIABLE: str(plan.database_socket)},
            user=ACCOUNTING_USER,
            address=plan.slurmdbd_port,
        ),
    ]


def _answers(address: Path | int) -> bool:
    """Whether somebody listens on a Unix socket, or on a port of this host."""
    family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
    with socket.socket(family) as probe:
        target = str(address) if isinstance(address, Path) else ("127.0.0.1", address)
        return probe.connect_ex(target) == 0


def belongs(folder: Path, process: Process, node: str | None = None) -> bool:
    """Whether a process is a daemon or runs in a job of the sandbox in `folder`; with `node`, on that node.

    A shell from which a user talks to the sandbox is not, though it has SLURM_CONF: only what Slurm started
    on a node knows the name of its node.
    """
    environ = process.environ
    if environ.get(MARK) == str(folder):
        return node is None or environ.get(NODE_MARK) == node
    if environ.get("SLURM_CONF") == str(conf_of(folder)):
        where = environ.get("SLURMD_NODENAME", "")
        return where == node if node else where.startswith(f"{folder.name}-")
    return False
