"""The daemons of a sandbox: munged, one slurmctld, one slurmd a node."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import SchedulerError
from hpctrain.sandbox.plan import Plan, conf_of
from hpctrain.sandbox.processes import Process
from hpctrain.sandbox.requirements import SEARCH_PATH

#: In the environment of every daemon and what it forks: the sandbox's folder, and the node for a slurmd.
MARK = "HPCTRAIN_SANDBOX"
NODE_MARK = "HPCTRAIN_SANDBOX_NODE"

#: The user that the munge packages make for their daemon, so that it need not be root.
MUNGE_USER = "munge"


@dataclass(frozen=True)
class Daemon:
    """One program that runs in the background; it is known by its command line, which names its sandbox."""

    label: str
    argv: tuple[str, ...]
    log: Path
    environ: Mapping[str, str]
    user: str | None = None
    node: str | None = None

    def start(self) -> None:
        """Start it; it goes to the background by itself.

        Raises:
            SchedulerError: it said at once that it cannot run.
        """
        try:
            done = subprocess.run(
                self.argv,
                env=dict(self.environ),
                user=self.user,
                group=self.user,
                extra_groups=None if self.user is None else [],
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=30,
            )
        except subprocess.TimeoutExpired:
            raise SchedulerError(f"{self.label} did not start within 30 s{self.last_words()}") from None
        if done.returncode:
            words = " ".join((done.stderr or done.stdout).split())
            why = f": {words}" if words else self.last_words()
            raise SchedulerError(f"{self.label} did not start, exit code {done.returncode}{why}")

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
