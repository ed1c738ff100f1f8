"""Wrap a command in the container of the job, with Pyxis or apptainer.

A container mounts the run folder, the working directory, the code and hpctrain itself, so an image requires
only Python and PyTorch. A rank's environment variables override those of the image.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import SpecError
from hpctrain.jobspec.container import APPTAINER_PROGRAMS
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import LIFELINE_VARIABLE

#: Folder of the package in the container; its parent folder is not mounted, because it contains the host's
#: PyTorch.
CONTAINER_PACKAGES = "/opt/hpctrain"
#: Identity and devices of a rank; Slurm sets these variables for each task.
_TASK_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME"),
    *("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    LIFELINE_VARIABLE,
)


@dataclass(frozen=True)
class ContainerCommand:
    command: list[str]
    srun_options: tuple[str, ...] = ()


def containerize(
    spec: JobSpec, command: list[str], names: Iterable[str], path: str | None
) -> ContainerCommand:
    """Wrap a task's command in the container of the job; unchanged without a container."""
    container = spec.container
    if container is None:
        return ContainerCommand(command)
    variables = list(dict.fromkeys([*_TASK_VARIABLES, *names, *container.env]))
    if container.runtime == "pyxis":
        options = (
            f"--container-image={container.image_name}",
            f"--container-mounts={','.join(_mounts(spec))}",
            f"--container-workdir={spec.workdir}",
            f"--container-env={','.join(variables)}",
        )
        return ContainerCommand(command, options)
    program = next(filter(None, (shutil.which(name, path=path) for name in APPTAINER_PROGRAMS)), None)
    if program is None:
        raise SpecError(
            f"Neither {' nor '.join(APPTAINER_PROGRAMS)} is on the PATH of the job ({path}), so "
            f"the job cannot run the container image {container.image!r} (--container-image). Load a module "
            "that provides apptainer or singularity (--module)."
        )
    command_line = [program, "exec", *(["--nv"] if spec.gpus_per_node else [])]
    for mount in _mounts(spec):
        command_line += ["--bind", mount]
    command_line += ["--pwd", spec.workdir, container.image_name, *command]
    # Also export the variables under the program's names.
    prefix = f"{Path(program).name.upper()}ENV_"
    exports = [f'[ -z "${{{name}+set}}" ] || export {prefix}{name}="${name}"' for name in variables]
    return ContainerCommand(["/bin/sh", "-c", "; ".join([*exports, 'exec "$@"']), "sh", *command_line])


def _mounts(spec: JobSpec) -> list[str]:
    """Return the mounts by destination; mounts of the user replace default mounts."""
    assert spec.container is not None
    package = Path(__file__).resolve().parents[2]
    folders = sorted(set(spec.folders.values()))
    outer = [path for path in folders if not any(path.startswith(f"{parent}/") for parent in folders)]
    mounts = {path: f"{path}:{path}" for path in outer}
    mounts[f"{CONTAINER_PACKAGES}/hpctrain"] = f"{package}:{CONTAINER_PACKAGES}/hpctrain:ro"
    mounts |= {mount.split(":")[1]: mount for mount in spec.container.mounts}
    return list(mounts.values())
