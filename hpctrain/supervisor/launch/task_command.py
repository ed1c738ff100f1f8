"""Build the commands and variables of a step's processes.

Every user of a node can read all command lines, so the values of `--env` are passed only in the environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hpctrain.cluster import compress_hostlist
from hpctrain.files import open_regular
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import ENV_PREFIX, GPUS_PER_TASK_VARIABLE, RunDir
from hpctrain.slurm.batch_header import shell_of
from hpctrain.supervisor.launch.container_command import CONTAINER_PACKAGES

_BOOT = (
    f"import runpy, sys; sys.path.insert(0, {CONTAINER_PACKAGES!r}); "
    "runpy.run_module('hpctrain.runtime.{name}', run_name='__main__', alter_sys=True)"
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
