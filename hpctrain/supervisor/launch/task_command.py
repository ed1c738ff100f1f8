"""Build the commands and variables of a step's processes, in a container with Pyxis or apptainer if asked.

Every user of a node can read all command lines, so the values of `--env` are passed only in the environment.
A container mounts the run folder, the working directory, the code and hpctrain itself, so an image requires
only Python and PyTorch. A rank's environment variables override those of the image.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster import compress_hostlist
from hpctrain.errors import SpecError
from hpctrain.files import open_regular
from hpctrain.jobspec.container import APPTAINER_PROGRAMS
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import ENV_PREFIX, GPUS_PER_TASK_VARIABLE, LIFELINE_VARIABLE, RunDir
from hpctrain.slurm.batch_header import shell_of

#: Folder of the package in the container; its parent folder is not mounted, because it contains the host's
#: PyTorch.
_PACKAGES = "/opt/hpctrain"
_BOOT = (
    f"import runpy, sys; sys.path.insert(0, {_PACKAGES!r}); "
    "runpy.run_module('hpctrain.runtime.{name}', run_name='__main__', alter_sys=True)"
)

#: Identity and devices of a rank; Slurm sets these variables for each task.
_TASK_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME"),
    *("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    LIFELINE_VARIABLE,
)


def worker_command(spec: JobSpec, num_nodes: int) -> list[str]:
    """Return the command of each process of a step: a rank, or the agent that starts the ranks of a node."""
    if spec.program == "batch":
        run = RunDir(Path(spec.run_dir))
        path = (run.array or run).batch_script
        with open_regular(path) as file:
            return [*shell_of(file.readline().decode(errors="replace")), str(path), *spec.args]
    program = json.dumps([spec.program, spec.entry, *spec.args])
    if spec.torchrun is None:
        return [*module_command(spec, "worker"), program]
    plan = {
        "nodes": num_nodes,
        "ranks_per_node": spec.ntasks_per_node,
        "backend": spec.torchrun.rdzv_backend,
        "endpoint": spec.torchrun.rdzv_endpoint,
        "worker": [*module_command(spec, "worker"), "torchrun", program],
    }
    return [*module_command(spec, "torchrun_agent"), json.dumps(plan)]


def module_command(spec: JobSpec, name: str) -> list[str]:
    """Return the command that runs a module of `hpctrain.runtime`."""
    if spec.container is not None:
        return [spec.container.python, "-P", "-c", _BOOT.format(name=name)]
    # -P: a file in the user's folder must not shadow a module of the same name.
    return [spec.python, "-P", "-m", f"hpctrain.runtime.{name}"]


def job_variables(spec: JobSpec, hosts: Sequence[str]) -> dict[str, str]:
    """Return the variables that `sbatch` sets for a job, for the nodes of an attempt."""
    nodes = compress_hostlist(hosts)
    variables = {"SLURM_JOB_NUM_NODES": str(len(hosts)), "SLURM_JOB_NODELIST": nodes, "SLURM_NODELIST": nodes}
    if spec.gpus_per_node:
        kind = f"{spec.gpu_type}:" if spec.gpu_type else ""
        variables["SLURM_GPUS_PER_NODE"] = f"{kind}{spec.gpus_per_node}"
    if spec.gpus_per_task > 1:
        variables[GPUS_PER_TASK_VARIABLE] = str(spec.gpus_per_task)
    return variables


def prefixed(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with a prefix, to hide them from the programs that start the rank."""
    return {ENV_PREFIX + name: value for name, value in env.items()}


def restore_names_command(command: list[str], names: Iterable[str]) -> list[str]:
    """Return a command that restores the names: env(1) expands `${NAME}` in the argument of `-S`."""
    names = list(names)
    if not names:
        return command
    unset = [f"--unset={ENV_PREFIX}{name}" for name in names]
    split = " ".join(f"{name}=${{{ENV_PREFIX}{name}}}" for name in names)
    return ["/usr/bin/env", *unset, f"--split-string={split}", *command]


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
    return ContainerCommand(["/bin/sh", "-c", _export(variables, Path(program).name), "sh", *command_line])


def _export(names: Collection[str], program: str) -> str:
    """Return a shell line that also exports variables under apptainer's names, then runs its arguments."""
    prefix = f"{program.upper()}ENV_"
    exports = [f'[ -z "${{{name}+set}}" ] || export {prefix}{name}="${name}"' for name in names]
    return "; ".join([*exports, 'exec "$@"'])


def _mounts(spec: JobSpec) -> list[str]:
    """Return the mounts by destination; mounts of the user replace default mounts."""
    assert spec.container is not None
    package = Path(__file__).resolve().parents[2]
    folders = sorted(set(spec.folders.values()))
    outer = [path for path in folders if not any(path.startswith(f"{parent}/") for parent in folders)]
    mounts = {path: f"{path}:{path}" for path in outer}
    mounts[f"{_PACKAGES}/hpctrain"] = f"{package}:{_PACKAGES}/hpctrain:ro"
    mounts |= {mount.split(":")[1]: mount for mount in spec.container.mounts}
    return list(mounts.values())
