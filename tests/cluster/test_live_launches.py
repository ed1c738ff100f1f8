"""`detect` under real launchers: the Slurm of the tests and the installed MPI implementations."""

import os
import shutil

import pytest
from helpers.commands import run_command
from helpers.launch_runner import Launch, check_detection, run
from helpers.launches import OTHERS, SLURM

pytestmark = pytest.mark.ranks

#: Agents of torchrun import torch one after the other; submitit polls for the end of its job.
_LONG = {"torchrun-two-agents", "torchrun-alone-in-each-task", "submitit-slurm"}
_EXTENDED = {"torchrun-under-srun", "submitit-local"}


@pytest.mark.parametrize("launch", SLURM, ids=lambda launch: launch.name)
def test_srun_steps_and_shells_are_detected(launch, tmp_path, slurm):
    check_detection(launch, run(launch, tmp_path, slurm.env, slurm.nodes))


def _with_marks(launch: Launch) -> object:
    marks = [pytest.mark.slurm] if launch.needs_slurm else []
    marks += [pytest.mark.long] if launch.name in _LONG else []
    marks += [pytest.mark.extended] if launch.name in _EXTENDED else []
    return pytest.param(launch, marks=marks, id=launch.name)


@pytest.mark.parametrize("launch", [_with_marks(launch) for launch in OTHERS])
def test_other_launchers_are_detected(launch, tmp_path, request):
    _need_commands(launch)
    box = request.getfixturevalue("slurm") if launch.needs_slurm else None
    check_detection(launch, run(launch, tmp_path, box.env if box else {}, box.nodes if box else []))


def _openmpi_version() -> str:
    return run_command(["mpirun.openmpi", "--version"]).stdout


def _need_commands(launch: Launch) -> None:
    needed = ["mpirun.openmpi", "mpiexec.mpich", "unshare", "script"]
    missing = [name for name in needed if name in launch.command and not shutil.which(name)]
    if "openmpi-" in launch.name and not missing and ") 4." not in _openmpi_version():
        pytest.skip("reads the variables of Open MPI 4")
    if "unshare" in launch.command and os.geteuid() != 0:
        missing.append("root, to make pretend hosts")
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"CI=true, so {missing} must be here", pytrace=False)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
