"""Accounting of a sandbox: a separate MariaDB, and slurmdbd, which stores Slurm's records in it."""

from __future__ import annotations

import shutil
import subprocess

from hpctrain.errors import SchedulerError
from hpctrain.sandbox.layout import SandboxLayout
from hpctrain.sandbox.requirements import SEARCH_PATH

#: User of MariaDB, which refuses to run as root. Created by Debian's Slurm packages.
MARIADB_USER = "slurm"

#: User of slurmdbd and administrator of the database. The controller, which runs as root, accepts changes of
#: associations and limits only from this user; otherwise it ignores them until its restart.
SLURMDBD_USER = "root"

#: Variable with the path of the database server's Unix socket.
SOCKET_VARIABLE = "MYSQL_UNIX_PORT"

_INSTALL_LIMIT_S = 60.0

_SLURMDBD_CONF = """\
# Written by `hpctrain sandbox up`; `man slurmdbd.conf` explains each line.
AuthType=auth/munge
AuthInfo=socket={munge_socket}
DbdHost=localhost
DbdPort={port}
SlurmUser={user}
LogFile={log}
PidFile={folder}/slurmdbd.pid

# The database authenticates us by the Unix socket; no password is needed.
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm
"""

_SLURM_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={port}
AccountingStoragePass={munge_socket}
JobAcctGatherType=jobacct_gather/linux
"""

_NO_ACCOUNTING = """\
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
"""


def slurm_conf_lines(plan: SandboxLayout) -> str:
    """Return the accounting lines of `slurm.conf`."""
    if not plan.shape.accounting:
        return _NO_ACCOUNTING
    return _SLURM_CONF.format(port=plan.slurmdbd_port, munge_socket=plan.munge_socket)


def create_accounting(plan: SandboxLayout) -> None:
    """Create the accounting folder, an empty database in it, and `slurmdbd.conf`.

    Raises:
        SchedulerError: the database could not be created; the message is from MariaDB.
    """
    plan.accounting.mkdir()
    plan.accounting.chmod(0o755)
    shutil.chown(plan.accounting, MARIADB_USER, MARIADB_USER)
    conf = _SLURMDBD_CONF.format(
        munge_socket=plan.munge_socket,
        port=plan.slurmdbd_port,
        user=SLURMDBD_USER,
        log=plan.slurmdbd_log,
        folder=plan.accounting,
    )
    plan.slurmdbd_conf.write_text(conf, encoding="utf-8")
    # Required by slurmdbd, because the file may contain a password.
    plan.slurmdbd_conf.chmod(0o600)
    _install_database(plan)


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


def _install_database(plan: SandboxLayout) -> None:
    command = [
        "mariadb-install-db",
        *_storage(plan),
        "--auth-root-authentication-method=socket",
        f"--auth-root-socket-user={SLURMDBD_USER}",
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
        words = " ".join((done.stderr + done.stdout).split())
        raise SchedulerError(f"mariadb-install-db failed with exit code {done.returncode}: {words}")
