"""Variables of a rank: those of the job, and those of `--env`, which are not passed on a command line.

Every user of a node can read the command lines of all processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hpctrain.cluster import compress_hostlist
from hpctrain.rundir import ENV_PREFIX, GPUS_PER_TASK_VARIABLE
from hpctrain.spec.job_spec import JobSpec


def job_variables(spec: JobSpec, hosts: Sequence[str]) -> dict[str, str]:
    """Return the variables that `sbatch` sets for a job, for the nodes of an attempt."""
    nodes = compress_hostlist(hosts)
    variables = {
        "SLURM_JOB_NUM_NODES": str(len(hosts)),
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NODELIST": nodes,
    }
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
    """Return a command that restores the names of the prefixed variables, then runs `command`.

    env(1) expands `${NAME}` in the argument of `-S`, so the command line contains only names.
    """
    names = list(names)
    if not names:
        return command
    unset = [f"--unset={ENV_PREFIX}{name}" for name in names]
    split = " ".join(f"{name}=${{{ENV_PREFIX}{name}}}" for name in names)
    return ["/usr/bin/env", *unset, f"--split-string={split}", *command]
