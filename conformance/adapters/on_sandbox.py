"""Start a sandbox with accounting, whose Slurm the tests of other tools then find."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from hpctrain import sandbox

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from helpers.accounting_slurm import AccountingSandbox

NAME = f"suites-{os.getpid()}"
HOME = Path(tempfile.mkdtemp(prefix="conformance-home-"))
COMMANDS = ("sacct", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")


def pytest_configure() -> None:
    box = sandbox.up(NAME, kind=AccountingSandbox, nodes=4, cpus_per_node=8)
    # Some tools remove SLURM_CONF from the environment.
    for command in COMMANDS:
        script = HOME / "bin" / command
        script.parent.mkdir(exist_ok=True)
        program = shutil.which(command, path="/usr/bin:/usr/local/bin")
        script.write_text(f'#!/bin/sh\nSLURM_CONF={box.conf} exec {program} "$@"\n')
        script.chmod(0o755)
    path = f"{HOME / 'bin'}:{os.environ['PATH']}"
    os.environ.update({**box.env, "HOME": str(HOME), "PATH": path})


def pytest_unconfigure() -> None:
    sandbox.down(NAME)
    shutil.rmtree(HOME, ignore_errors=True)
