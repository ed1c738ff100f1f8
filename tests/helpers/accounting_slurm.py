"""A sandbox with slurmdbd and its database: a cluster on which `sacct` works."""

import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from helpers.commands import skip_or_fail
from hpctrain.cluster.processes import processes
from hpctrain.errors import SchedulerError
from hpctrain.sandbox import Sandbox
from hpctrain.sandbox.daemons import Daemon, daemon_environ
from hpctrain.sandbox.layout import SEARCH_PATH, SandboxLayout
from hpctrain.sandbox.slurm_conf import with_setting

_PROGRAMS = ("slurmdbd", "sacct", "sacctmgr", "mariadbd", "mariadb-install-db", "my_print_defaults")
#: User of MariaDB, which refuses to run as root. Created by Debian's Slurm packages.
_USER = "slurm"
_LIMIT_S = 60.0

_SETTINGS = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={port}
AccountingStoragePass={munge_socket}
JobAcctGatherType=jobacct_gather/linux
"""
_SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={munge_socket}
DbdHost=localhost
DbdPort={port}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid

# The database authenticates us by the Unix socket; no password is needed. The controller, which runs as root,
# accepts changes of associations and limits only from its own user.
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""


def need_accounting() -> None:
    missing = [program for program in _PROGRAMS if not shutil.which(program, path=SEARCH_PATH)]
    skip_or_fail(f"these programs are missing: {', '.join(missing)}" if missing else None)


class AccountingSandbox(Sandbox):
    """A sandbox with slurmdbd and MariaDB. `sandbox.up(…, kind=AccountingSandbox)` starts one."""

    def prepare(self) -> None:
        folder = _folder(self)
        folder.mkdir(mode=0o755)
        shutil.chown(folder, _USER, _USER)
        values = {"port": self.ports[-1], "munge_socket": self.munge_socket, "folder": folder}
        text = self.conf.read_text()
        for line in _SETTINGS.format(**values).splitlines():
            text = with_setting(text, line)
        self.conf.write_text(text)
        conf = self.conf.with_name("slurmdbd.conf")
        conf.write_text(_SLURMDBD_CONF.format(**values))
        # Required by slurmdbd, because the file may contain a password.
        conf.chmod(0o600)
        options = [
            "--auth-root-authentication-method=socket",
            "--auth-root-socket-user=root",
            "--skip-test-db",
        ]
        subprocess.run(
            ["mariadb-install-db", *_storage(self), *options, "--skip-name-resolve"],
            env={"PATH": SEARCH_PATH, "LC_ALL": "C.UTF-8"},
            user=_USER,
            group=_USER,
            extra_groups=[],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=True,
        )

    def list_daemons(self) -> list[Daemon]:
        munged, *others = super().list_daemons()
        folder, environ = _folder(self), daemon_environ(self)
        database_socket = folder / "socket"
        mariadbd = (
            *(
                "mariadbd",
                *_storage(self),
                f"--socket={database_socket}",
                f"--pid-file={folder}/mariadbd.pid",
            ),
            *("--skip-networking", "--innodb-lock-wait-timeout=900"),
        )
        # The argument of slurmdbd only identifies the process.
        slurmdbd = ("slurmdbd", str(self.conf.with_name("slurmdbd.conf")))
        variables = {**environ, "MYSQL_UNIX_PORT": str(database_socket)}
        return [
            munged,
            _Database("mariadbd", mariadbd, folder / "mariadbd.log", environ, _USER, address=database_socket),
            _AwaitedDaemon(
                "slurmdbd",
                slurmdbd,
                folder / "slurmdbd.log",
                variables,
                launcher=munged.launcher,
                address=self.ports[-1],
            ),
            *others,
        ]

    def _trouble(self) -> str | None:
        query = ("sacctmgr", "--noheader", "--parsable2", "list", "cluster", self.name, "format=ControlPort")
        if (trouble := super()._trouble()) is None and self._run(*query).strip() != str(self.port):
            return "the controller has not registered with slurmdbd"
        return trouble


def _folder(plan: SandboxLayout) -> Path:
    return plan.folder / "accounting"


def _storage(plan: SandboxLayout) -> tuple[str, ...]:
    return (
        "--no-defaults",
        f"--datadir={_folder(plan)}/data",
        # Small and fast: durability is not required for a sandbox.
        "--innodb-log-file-size=8M",
        "--innodb-buffer-pool-size=32M",
        "--innodb-flush-log-at-trx-commit=2",
        "--aria-sync-log-dir=NEVER",
        "--sync-frm=0",
        # Containers and many sandboxes soon exhaust the kernel's AIO slots.
        "--innodb-use-native-aio=0",
    )


@dataclass(frozen=True)
class _AwaitedDaemon(Daemon):
    """A daemon on whose socket or port the next daemon depends."""

    address: Path | int = 0

    def start(self) -> None:
        super().start()
        deadline = time.monotonic() + _LIMIT_S
        while not _answers(self.address):
            # The command line of the launcher ends with the same words.
            if not any(process.argv[-len(self.argv) :] == self.argv for process in processes()):
                raise SchedulerError(f"{self.label} exited{self.log_tail()}")
            if time.monotonic() > deadline:
                raise SchedulerError(f"{self.label} did not start{self.log_tail()}")
            time.sleep(0.02)


@dataclass(frozen=True)
class _Database(_AwaitedDaemon):
    """MariaDB neither daemonizes nor opens its log itself."""

    @property
    def command(self) -> tuple[str, ...]:
        redirect = 'exec "$@" >>"$0" 2>&1'
        return ("setsid", "--fork", "sh", "-c", redirect, str(self.log), *super().command)


def _answers(address: Path | int) -> bool:
    family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
    with socket.socket(family) as probe:
        target = str(address) if isinstance(address, Path) else ("127.0.0.1", address)
        return probe.connect_ex(target) == 0
