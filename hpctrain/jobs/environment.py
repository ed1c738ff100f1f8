"""Variables for Slurm's commands and for a job, out of those of a submission."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE

#: Variables of Slurm that say where the cluster is; all other SLURM_* speak of the job around this
#: process, and a job submitted from within a job must not inherit them.
_CLUSTER_VARIABLES = frozenset(
    {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_JWKS", "SLURM_SACK_KEY"}
)
_JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
#: Filters and formats that would change what the commands answer.
_ANSWER_PREFIXES = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_")
#: A rank of another run around this process.
_RANK_VARIABLES = frozenset(
    {
        RUN_DIR_VARIABLE,
        ATTEMPT_VARIABLE,
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)

# Variables of sbatch(1), section INPUT ENVIRONMENT VARIABLES, whose names do not follow the option's.
_SBATCH_VARIABLES = {"mem": "MEM_PER_NODE", "time": "TIMELIMIT"}

#: Variables of sbatch that would take back what every run rests on.
_OVERRULED = frozenset(
    {
        "SBATCH_ARRAY_INX",
        "SBATCH_GPUS",
        "SBATCH_GPUS_PER_NODE",
        "SBATCH_GPUS_PER_SOCKET",
        "SBATCH_GPUS_PER_TASK",
        "SBATCH_NO_KILL",
        "SBATCH_NO_REQUEUE",
        "SBATCH_WAIT",
    }
)


def outer_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of a job, a rank or a format that surround this process."""
    return {
        name: value for name, value in environ.items() if name in _CLUSTER_VARIABLES or not _is_inner(name)
    }


def sbatch_environment(environ: Mapping[str, str], directives: Collection[str]) -> dict[str, str]:
    """The variables for sbatch, which takes SBATCH_* over what stands in the script.

    What the script says has to win, so the variables of its directives are left out; a user's
    default for anything else, such as SBATCH_ACCOUNT, stays.
    """
    written = {"SBATCH_" + _SBATCH_VARIABLES.get(key, key.upper().replace("-", "_")) for key in directives}
    overruled = _OVERRULED | written
    return {name: value for name, value in outer_environment(environ).items() if name not in overruled}


def _is_inner(name: str) -> bool:
    return name in _RANK_VARIABLES or name.startswith((*_JOB_PREFIXES, *_ANSWER_PREFIXES))
