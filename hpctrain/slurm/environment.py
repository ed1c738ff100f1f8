"""Derive the environment of Slurm's commands and of a job from the environment of the submission.

A job may be submitted from anywhere: a login node, a notebook inside an allocation, a task of an array job, a
rank of torchrun or mpirun. Variables set by the surrounding job, step and launcher must not be passed to the
new job.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain import rundir
from hpctrain.slurm.sbatch_options import OPTIONS

#: Names of the variables to which hpctrain sets default values, so that a job submitted from a rank does not
#: inherit them.
DEFAULTS_VARIABLE = "HPCTRAIN_DEFAULTS"
#: SLURM_* variables that describe the cluster. All others describe the surrounding job, and a new job must
#: not inherit them.
_CLUSTER_VARIABLES = frozenset(
    {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_JWKS", "SLURM_SACK_KEY"}
)
_JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "_SLURM_", "SPANK_")
#: Prefixes of filters and formats that would change the output of the commands.
_ANSWER_PREFIXES = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_")
#: Set for a rank of a surrounding run.
_RANK_VARIABLES = frozenset(
    {
        *(rundir.RUN_DIR_VARIABLE, rundir.ATTEMPT_VARIABLE, rundir.ARRAY_TASK_VARIABLE),
        *(rundir.BATCH_PID_VARIABLE, rundir.CODE_VARIABLE, rundir.CODE_SOURCE_VARIABLE),
        *(rundir.CHILD_VARIABLE, rundir.GPUS_PER_TASK_VARIABLE, rundir.INDEPENDENT_RANKS_VARIABLE),
        *(rundir.LIFELINE_VARIABLE, *rundir.HISTORY_VARIABLES, rundir.PREDECESSOR_VARIABLE),
        *(rundir.CHECKPOINTS_VARIABLE, rundir.SUPERVISOR_ADDRESS_VARIABLE, rundir.STAGE_VARIABLE),
        rundir.STOP_GRACE_VARIABLE,
        *(rundir.VERIFY_STEPS_VARIABLE, rundir.VERIFY_SYNC_STEPS_VARIABLE, rundir.CPU_BINDING_VARIABLE),
        *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
_RANK_PREFIXES = ("TORCHELASTIC_", "SUBMITIT_", "HYDI_")

#: Prefixes of a launcher's variables, by a variable that only the launcher sets. Without this variable, a
#: variable such as OMPI_MCA_btl or PMIX_MCA_gds is a setting of the user, which the job needs.
_LAUNCHER_PREFIXES = {
    "OMPI_COMM_WORLD_SIZE": ("OMPI_", "PMIX_", "PRTE_"),
    "PMIX_RANK": ("PMIX_",),
    "PMI_RANK": ("PMI_", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"),
    "HOROVOD_RANK": (
        *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_", "HOROVOD_HOSTNAME"),
        *("HOROVOD_GLOO_", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_ELASTIC"),
    ),
    # sbatch(1), section OUTPUT ENVIRONMENT VARIABLES: options of the surrounding job.
    "SLURM_JOB_ID": ("SBATCH_MEM_BIND", "SBATCH_CPU_BIND"),
}
#: Variables that expose a task's GPUs. Another job has other GPUs.
_DEVICE_VARIABLES = frozenset(
    {
        *("CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "GPU_DEVICE_ORDINAL"),
        *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    }
)

#: Variables that are not named after their options.
_RENAMED = {
    "bb": "BURST_BUFFER",
    "cpu-freq": "CPU_FREQ_REQ",
    "mem": "MEM_PER_NODE",
    "segment": "SEGMENT_SIZE",
    "switches": "REQ_SWITCH",
    "time": "TIMELIMIT",
}
#: The variable of each option of sbatch that has one.
SBATCH_VARIABLES = {
    key: "SBATCH_" + _RENAMED.get(key, key.upper().replace("-", "_"))
    for key, option in OPTIONS.items()
    if option.has_variable
}

#: sbatch variables that would break assumptions of every run.
_OVERRULED = frozenset(
    f"SBATCH_{name}"
    for name in (
        *("ARRAY_INX", "CPUS_PER_GPU", "ERROR", "GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK"),
        *("INPUT", "NO_KILL", "NO_REQUEUE", "WAIT"),
    )
)


def apply_env_defaults(environ: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with those `defaults` that it lacks."""
    added = {name: value for name, value in defaults.items() if name not in environ}
    if not added:
        return dict(environ)
    names = [*environ.get(DEFAULTS_VARIABLE, "").split(), *added]
    return {**environ, **added, DEFAULTS_VARIABLE: " ".join(names)}


def env_default_names(environ: Mapping[str, str]) -> set[str]:
    """Return the variables set by `apply_env_defaults`, including `DEFAULTS_VARIABLE` itself."""
    return {DEFAULTS_VARIABLE, *environ.get(DEFAULTS_VARIABLE, "").split()}


def strip_job_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables of a surrounding job or rank, and without output formats."""
    names = env_default_names(environ) | _RANK_VARIABLES
    prefixes = [*_JOB_PREFIXES, *_ANSWER_PREFIXES, *_RANK_PREFIXES]
    for mark, written in _LAUNCHER_PREFIXES.items():
        if mark in environ:
            prefixes += written
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("OMP_NUM_THREADS") == "1":
        # torchrun's default, which would slow down every rank with more CPUs.
        names.add("OMP_NUM_THREADS")
    inner = tuple(prefixes)
    outer = {
        name: value
        for name, value in environ.items()
        if name in _CLUSTER_VARIABLES or not (name in names or name.startswith(inner))
    }
    if clusters := outer.pop("SBATCH_CLUSTERS", None):
        # All commands must use the cluster to which sbatch submits.
        outer.setdefault("SLURM_CLUSTERS", clusters)
    return outer


def loaded_modules(environ: Mapping[str, str]) -> list[str]:
    """Return the environment modules of this shell, as Environment Modules and Lmod list them."""
    return [name for name in environ.get("LOADEDMODULES", "").split(":") if name]


def own_job_id(environ: Mapping[str, str]) -> str:
    """Return the id of this batch script's job for Slurm's commands."""
    # SLURM_JOB_ID of the last task is the number of the array: a request with it would affect all tasks.
    if "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


def sbatch_env(environ: Mapping[str, str], directives: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of sbatch, without variables that would override the script."""
    differing = {name for key, name in SBATCH_VARIABLES.items() if environ.get(name) != directives.get(key)}
    removed = _OVERRULED | differing | (_DEVICE_VARIABLES if "SLURM_JOB_ID" in environ else set())
    return {name: value for name, value in strip_job_env(environ).items() if name not in removed}
