"""Start the daemons of a sandbox: munged, slurmctld, one slurmd per node, and two for accounting."""

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
from hpctrain.sandbox.layout import SEARCH_PATH, SandboxLayout
from hpctrain.sandbox.processes import NODE_VARIABLE, SANDBOX_VARIABLE

#: User created by the munge packages: munged does not require root.
MUNGE_USER = "munge"
#: User of MariaDB, which refuses to run as root. Created by Debian's Slurm packages.
MARIADB_USER = "slurm"

_INSTALL_LIMIT_S = 60.0
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
        """Start the program in the background; with an address, wait until it accepts connections."""
        pipe: AbstractContextManager[int | IO[bytes]] = nullcontext(subprocess.PIPE)
        launcher = self.launcher
        if self.user is not None:
            # Only root can run a launcher, so the user changes afterwards.
            launcher += ("setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups")
        if self.stays_in_front:
            pipe, launcher = open(self.log, "ab"), ("setsid", "--fork", *launcher)
        try:
            with pipe as out:
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
            output = " ".join((done.stderr or done.stdout or "").split())
            reason = f": {output}" if output else self.log_tail()
            raise SchedulerError(f"{self.label} did not start (exit code {done.returncode}){reason}")
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
    files = (f"--{name}-file={plan.munge / name}" for name in ("key", "seed", "pid", "log"))
    munged = ("munged", f"--socket={plan.munge_socket}", *files)
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
    database_log, slurmdbd_log = plan.accounting / "mariadbd.log", plan.accounting / "slurmdbd.log"
    # The argument of slurmdbd only identifies the process: it reads its configuration from the folder of
    # SLURM_CONF.
    slurmdbd = ("slurmdbd", str(plan.conf.with_name("slurmdbd.conf")))
    variables = {**environ, "MYSQL_UNIX_PORT": str(plan.database_socket)}
    return [
        Daemon(
            "mariadbd",
            mariadbd_argv(plan),
            database_log,
            environ,
            user=MARIADB_USER,
            stays_in_front=True,
            address=plan.database_socket,
        ),
        Daemon("slurmdbd", slurmdbd, slurmdbd_log, variables, address=plan.slurmdbd_port, launcher=launcher),
    ]


def mariadbd_argv(plan: SandboxLayout) -> tuple[str, ...]:
    """Return the command that starts the database, on a Unix socket only."""
    return (
        "mariadbd",
        *_storage(plan),
        f"--socket={plan.database_socket}",
        f"--pid-file={plan.accounting}/mariadbd.pid",
        "--skip-networking",
        # Recommended for slurmdbd, whose roll-up holds locks for long.
        "--innodb-lock-wait-timeout=900",
    )


def _storage(plan: SandboxLayout) -> tuple[str, ...]:
    return (
        "--no-defaults",
        f"--datadir={plan.accounting}/data",
        # Small and fast: durability is not required for a sandbox.
        "--innodb-log-file-size=8M",
        "--innodb-buffer-pool-size=32M",
        "--innodb-flush-log-at-trx-commit=2",
        "--aria-sync-log-dir=NEVER",
        "--sync-frm=0",
        # Containers and many sandboxes soon exhaust the kernel's AIO slots.
        "--innodb-use-native-aio=0",
    )


def install_database(plan: SandboxLayout) -> None:
    """Create an empty database."""
    command = [
        "mariadb-install-db",
        *_storage(plan),
        "--auth-root-authentication-method=socket",
        "--auth-root-socket-user=root",
        "--skip-test-db",
        "--skip-name-resolve",
    ]
    try:
        done = subprocess.run(
            command,
            env={"PATH": SEARCH_PATH, "LC_ALL": "C.UTF-8"},
            user=MARIADB_USER,
            group=MARIADB_USER,
            extra_groups=[],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_INSTALL_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"mariadb-install-db did not finish within {_INSTALL_LIMIT_S:.0f} s") from None
    if done.returncode:
        output = " ".join((done.stderr + done.stdout).split())
        raise SchedulerError(f"mariadb-install-db failed with exit code {done.returncode}: {output}")


def _answers(address: Path | int) -> bool:
    """True if a Unix socket, or a port of this host, accepts connections."""
    family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
    with socket.socket(family) as probe:
        target = str(address) if isinstance(address, Path) else ("127.0.0.1", address)
        return probe.connect_ex(target) == 0
