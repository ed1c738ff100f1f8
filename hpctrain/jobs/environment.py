"""Variables for Slurm's commands and for a job, out of those of a submission.

A job may be submitted from anywhere: a login node, a notebook inside an allocation, a task of an array job, a
rank of torchrun or mpirun. What the job, the step and the launcher around the submission wrote into its
environment speaks of them, and the new job must not take it for its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hpctrain.cluster.defaults import names_of_defaults
from hpctrain.rundir import (
    ARRAY_TASK_VARIABLE,
    ATTEMPT_VARIABLE,
    CODE_SOURCE_VARIABLE,
    CODE_VARIABLE,
    LIFELINE_VARIABLE,
    PREDECESSOR_VARIABLE,
    RUN_DIR_VARIABLE,
)

#: Variables of Slurm that say where the cluster is; all other SLURM_* speak of the job around this
#: process, and a job submitted from within a job must not inherit them.
_CLUSTER_VARIABLES = frozenset(
    {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_JWKS", "SLURM_SACK_KEY"}
)
_JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "_SLURM_", "SPANK_")
#: Filters and formats that would change what the commands answer.
_ANSWER_PREFIXES = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_")
#: A rank of another run around this process.
_RANK_VARIABLES = frozenset(
    {
        RUN_DIR_VARIABLE,
        ATTEMPT_VARIABLE,
        ARRAY_TASK_VARIABLE,
        CODE_VARIABLE,
        CODE_SOURCE_VARIABLE,
        LIFELINE_VARIABLE,
        PREDECESSOR_VARIABLE,
        "RANK",
        "LOCAL_RANK",
        "NODE_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
_RANK_PREFIXES = ("TORCHELASTIC_", "SUBMITIT_", "HYDI_")

#: What a launcher writes is known by a variable that nobody sets by hand. Without that, a variable such as
#: OMPI_MCA_btl or PMIX_MCA_gds is a setting of the user's, who wants it in the job.
_OF_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": ("OMPI_", "PMIX_", "PRTE_"),
    "PMIX_RANK": ("PMIX_",),
    "PMI_RANK": ("PMI_", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"),
    "HOROVOD_RANK": (
        *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_", "HOROVOD_HOSTNAME"),
        *("HOROVOD_GLOO_", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_ELASTIC"),
    ),
    # sbatch(1), section OUTPUT ENVIRONMENT VARIABLES: the options of the job around this process.
    "SLURM_JOB_ID": ("SBATCH_MEM_BIND", "SBATCH_CPU_BIND"),
}
#: How Slurm shows a task its GPUs. A job elsewhere has others.
_DEVICE_VARIABLES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "GPU_DEVICE_ORDINAL",
        "ROCR_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
    }
)

# Variables of sbatch(1), section INPUT ENVIRONMENT VARIABLES, whose names do not follow the option's.
_SBATCH_VARIABLES = {"mem": "MEM_PER_NODE", "switches": "REQ_SWITCH", "time": "TIMELIMIT"}
#: Of these sbatch takes one only, so one in the script overrules the variables of all.
_MEMORY = frozenset({"mem", "mem-per-cpu", "mem-per-gpu"})

#: Variables of sbatch that would take back what every run rests on.
_OVERRULED = frozenset(
    {
        "SBATCH_ARRAY_INX",
        "SBATCH_CPUS_PER_GPU",
        "SBATCH_ERROR",
        "SBATCH_GPUS",
        "SBATCH_GPUS_PER_NODE",
        "SBATCH_GPUS_PER_SOCKET",
        "SBATCH_GPUS_PER_TASK",
        "SBATCH_INPUT",
        "SBATCH_NO_KILL",
        "SBATCH_NO_REQUEUE",
        "SBATCH_WAIT",
    }
)


def outer_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of a job, a rank or a format that surround this process.

    GPUs that a job gave to this process stay visible: what is started here has no others.
    """
    names = names_of_defaults(environ) | _RANK_VARIABLES
    prefixes = [*_JOB_PREFIXES, *_ANSWER_PREFIXES, *_RANK_PREFIXES]
    for mark, written in _OF_LAUNCHERS.items():
        if mark in environ:
            prefixes += written
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("OMP_NUM_THREADS") == "1":
        # torchrun's own choice, which would slow down every rank of a job with more CPUs.
        names.add("OMP_NUM_THREADS")
    inner = tuple(prefixes)
    return {
        name: value
        for name, value in environ.items()
        if name in _CLUSTER_VARIABLES or not (name in names or name.startswith(inner))
    }


def sbatch_variable(key: str) -> str:
    """The variable by which sbatch takes the option `key`, given by its long name."""
    return "SBATCH_" + _SBATCH_VARIABLES.get(key, key.upper().replace("-", "_"))


def sbatch_environment(environ: Mapping[str, str], directives: Collection[str]) -> dict[str, str]:
    """The variables for sbatch, which takes SBATCH_* over what stands in the script.

    What the script says has to win, so the variables of its directives are left out; a user's
    default for anything else, such as SBATCH_ACCOUNT, stays. So does a CUDA_VISIBLE_DEVICES of the user's,
    but not one that a job around this process set for its own GPUs.
    """
    written = {*directives, *(_MEMORY if _MEMORY.intersection(directives) else ())}
    left_out = _OVERRULED | set(map(sbatch_variable, written))
    if "SLURM_JOB_ID" in environ:
        left_out |= _DEVICE_VARIABLES
    return {name: value for name, value in outer_environment(environ).items() if name not in left_out}
