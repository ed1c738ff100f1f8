"""Check that this machine can run a sandbox."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence

from hpctrain.errors import UserError
from hpctrain.sandbox.layout import SEARCH_PATH

#: Additional programs of a sandbox with accounting; the last three belong to MariaDB.
_ACCOUNTING_PROGRAMS = (
    *("slurmdbd", "sacct", "sacctmgr"),
    *("mariadbd", "mariadb-install-db", "my_print_defaults"),
)
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")


def installed_version(search_path: str = SEARCH_PATH) -> str:
    """Return the version of the installed Slurm, such as `22.05.8`; empty if there is none."""
    program = shutil.which("slurmctld", path=search_path)
    if program is None:
        return ""
    return subprocess.run([program, "-V"], capture_output=True, text=True, timeout=20).stdout.split()[-1]


def check_requirements(
    system: str = platform.system(),
    uid: int | None = None,
    search_path: str = SEARCH_PATH,
    *,
    accounting: bool = False,
    slurm: str = "",
) -> None:
    """Check that a sandbox can be started, optionally with accounting or another Slurm version."""
    if system != "Linux":
        raise UserError(
            f"A sandbox requires Linux, but this machine runs {system}. Use a Linux container or virtual "
            "machine. A sandbox is not needed for `hpctrain submit --backend local`."
        )
    if not slurm and (missing := _missing(_PROGRAMS, search_path)):
        raise UserError(
            f"A sandbox requires Slurm, but these programs are missing: {', '.join(missing)}. On Debian and "
            "Ubuntu, run `apt-get install slurm-wlm munge`."
        )
    # Another version brings Slurm's own programs.
    programs = _ACCOUNTING_PROGRAMS[-3:] if slurm else _ACCOUNTING_PROGRAMS
    if accounting and (missing := _missing(programs, search_path)):
        raise UserError(
            f"A sandbox with --accounting requires slurmdbd and MariaDB, but these programs are missing: "
            f"{', '.join(missing)}. On Debian and Ubuntu, run `apt-get install slurmdbd mariadb-server`, or "
            "remove --accounting."
        )
    uid = os.geteuid() if uid is None else uid
    if uid != 0:
        raise UserError(
            f"A sandbox requires root, because it creates device files and adds its nodes to /etc/hosts. "
            f"This process runs as user {uid}. Try again with sudo."
        )


def _missing(programs: Sequence[str], search_path: str) -> list[str]:
    return [program for program in programs if not shutil.which(program, path=search_path)]
