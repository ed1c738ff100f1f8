"""Ranks inside of a container: what srun or apptainer is told.

The folder of the run, the working folder, the code and the package hpctrain itself are mounted, so that an
image needs Python and PyTorch only. What a rank is told in its environment wins over what the image says.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import SpecError
from hpctrain.jobs.container import Container
from hpctrain.jobs.containers import PROGRAMS
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import LIFELINE_VARIABLE

#: Where the package lies inside; apart from all else, for beside it on the host lies the host's PyTorch.
_PACKAGES = "/opt/hpctrain"
_BOOT = (
    f"import runpy, sys; sys.path.insert(0, {_PACKAGES!r}); "
    "runpy.run_module('hpctrain.runtime.{name}', run_name='__main__', alter_sys=True)"
)

#: What tells a rank who it is, and which devices are its own; Slurm sets it for each task.
_OF_A_TASK = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME"),
    *("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    LIFELINE_VARIABLE,
)


def module_inside(container: Container, name: str) -> list[str]:
    """The words by which a module of `hpctrain.runtime` is started inside."""
    return [container.python, "-P", "-c", _BOOT.format(name=name)]


@dataclass(frozen=True)
class Enclosed:
    """A command as it is started in a container."""

    command: list[str]
    srun_options: tuple[str, ...] = ()


def enclose(spec: JobSpec, command: list[str], names: Iterable[str], path: str | None) -> Enclosed:
    """Put the command of a task into the container that the job asks for; without one it stays as it is.

    Args:
        spec: the job.
        command: what to run inside.
        names: variables that the task is given, and that win over the image's.
        path: where to look for the program of apptainer.

    Raises:
        SpecError: that program is not there.
    """
    container = spec.container
    if container is None:
        return Enclosed(command)
    winning = list(dict.fromkeys([*_OF_A_TASK, *names, *container.env]))
    if container.runtime == "pyxis":
        options = (
            f"--container-image={container.image_name}",
            f"--container-mounts={','.join(_mounts(spec))}",
            f"--container-workdir={spec.workdir}",
            f"--container-env={','.join(winning)}",
        )
        return Enclosed(command, options)
    program = next((found for name in PROGRAMS if (found := shutil.which(name, path=path))), None)
    if program is None:
        raise SpecError(
            f"Neither {' nor '.join(PROGRAMS)} is on the PATH of the job ({path}), so {container.image!r} "
            "(--container-image) cannot be started. Have a module bring it (--module)."
        )
    words = [program, "exec", *(["--nv"] if spec.gpus_per_node else [])]
    for mount in _mounts(spec):
        words += ["--bind", mount]
    words += ["--pwd", spec.workdir, container.image_name, *command]
    return Enclosed(["/bin/sh", "-c", _export(winning, Path(program).name), "sh", *words])


def _export(names: Collection[str], program: str) -> str:
    """A line of shell that runs its arguments, each variable that is set also under apptainer's name for it.

    Only in the task itself are the values known that Slurm gives to it.
    """
    prefix = f"{program.upper()}ENV_"
    settings = [f'${{{name}+"{prefix}{name}=${name}"}}' for name in names]
    return f'exec /usr/bin/env {" ".join(settings)} "$@"'


def _mounts(spec: JobSpec) -> list[str]:
    """What is mounted: by destination, what the user asks for over what is mounted anyway."""
    assert spec.container is not None
    package = Path(__file__).resolve().parents[1]
    folders = sorted(set(spec.folders.values()))
    inside_another = {path for path in folders for other in folders if path.startswith(f"{other}/")}
    mounts = {path: f"{path}:{path}" for path in folders if path not in inside_another}
    mounts[f"{_PACKAGES}/hpctrain"] = f"{package}:{_PACKAGES}/hpctrain:ro"
    mounts |= {mount.split(":")[1]: mount for mount in spec.container.mounts}
    return list(mounts.values())
