"""Ranks inside a job step started by `srun`.

Only a *step* has ranks. A batch script, an `salloc` shell or an ssh session inside an allocation has many
SLURM_* variables, too, among them SLURM_PROCID=0 and the task count of the whole job. If these were used as
ranks, a process would wait for peers that were never started. SLURM_STEP_ID identifies a step.

Only the variables of the step (SLURM_STEP_…) describe its layout. The variables of the job differ if the step
uses only a part of the job.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.cluster.env_variables import ENVIRONMENT_VARIABLE, override_hint, read_int
from hpctrain.cluster.mpi_launchers import master_endpoint
from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.step_layout import HOSTS, NUM_TASKS, TASKS, StepLayout, read_layout
from hpctrain.errors import EnvironmentMismatch

#: Step ids from this number are reserved by Slurm: batch script, external and interactive step (slurm.h).
#: Slurm 26.05 prints them as negative numbers, and sets them in the batch script as well.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_SHELLS = {"bash", "sh", "zsh", "fish", "tcsh", "csh", "ksh", "dash"}


def detect(environ: Mapping[str, str]) -> Ranks | None:
    """Return the ranks of this task of a job step, or None outside a job step.

    Raises:
        EnvironmentMismatch: Slurm's variables contradict each other, are incomplete, or do not determine the
            node of rank 0.
    """
    if not environ.get("SLURM_PROCID"):
        return None
    rank = read_int(environ, "SLURM_PROCID")
    if not _in_step(environ):
        lost_job = environ.get("SLURM_STEP_ID") and not environ.get("SLURM_JOB_ID")
        if rank or lost_job:
            missing = "SLURM_JOB_ID" if lost_job else "the job step (SLURM_JOB_ID, SLURM_STEP_ID)"
            raise EnvironmentMismatch(
                f"The rank is {rank} (SLURM_PROCID), but {missing} is not set. A container may have removed "
                "variables that srun sets. Pass all SLURM_* variables to the container, or set "
                f"{ENVIRONMENT_VARIABLE}=local to run a single process."
            )
        return None
    layout = read_layout(environ)
    if environ.get(ENVIRONMENT_VARIABLE) != "slurm":
        _refuse_shell(layout, environ)
        _refuse_batch_script(layout, environ)
    _check_tasks_here(rank, layout, environ)
    key = _key(environ)
    address, port, meeting = master_endpoint(
        environ,
        lambda: (layout.host_of_main(rank, environ), f"first of {layout.source}"),
        key,
        "SLURM_CLUSTER_NAME, _ARRAY_JOB_ID, _JOB_ID, _STEP_ID and _RESTART_COUNT",
    )
    return Ranks(
        rank=rank,
        world_size=layout.num_tasks,
        local_rank=read_int(environ, "SLURM_LOCALID"),
        local_world_size=layout.num_tasks_here,
        node_rank=layout.node_rank,
        num_nodes=len(layout.nodes),
        master_addr=address,
        master_port=port,
        environment="slurm",
        rendezvous_id=key,
        sources={
            "rank": "SLURM_PROCID",
            "world_size": NUM_TASKS,
            "local_rank": "SLURM_LOCALID",
            "local_world_size": TASKS,
            "node_rank": "SLURM_NODEID",
            "num_nodes": HOSTS,
            **meeting,
        },
    )


def _in_step(environ: Mapping[str, str]) -> bool:
    return (
        bool(environ.get("SLURM_JOB_ID"))
        and bool(environ.get("SLURM_STEP_ID"))
        and 0 <= read_int(environ, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP
    )


def _key(environ: Mapping[str, str]) -> str:
    """Return an identifier of the step, equal on all of its ranks and different in other steps."""
    # Clusters that share hosts may have jobs with the same number.
    names = ("SLURM_CLUSTER_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    cluster, array, job, step = (environ.get(name, "") for name in names)
    return f"{cluster}/{array}/{job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')}"


def _refuse_shell(layout: StepLayout, environ: Mapping[str, str]) -> None:
    """Reject rank 0 in a shell started by `srun --pty --ntasks=4 bash`, whose peers exited immediately.

    Later steps inherit SLURM_PTY_PORT, but are not step 0 of such a job.
    """
    if (
        layout.num_tasks > 1
        and environ.get("SLURM_PTY_PORT")
        and environ["SLURM_STEP_ID"] == "0"
        and environ.get("SLURM_JOB_NAME") in _SHELLS
    ):
        raise EnvironmentMismatch(
            f"There are {layout.num_tasks} tasks ({NUM_TASKS}), but this process runs in an interactive "
            f"{environ['SLURM_JOB_NAME']} shell (SLURM_PTY_PORT, SLURM_JOB_NAME), and the shells of the "
            "other tasks have exited. Start the interactive shell with --ntasks=1, or start the ranks with "
            f"another srun. To run a single process anyway, set {ENVIRONMENT_VARIABLE}=local. To run this "
            f"process as one of {layout.num_tasks} ranks, set {ENVIRONMENT_VARIABLE}=slurm."
        )


def _refuse_batch_script(layout: StepLayout, environ: Mapping[str, str]) -> None:
    """Reject rank 0 in a batch script that was submitted from a job step and inherited its variables.

    Slurm replaces the variables of the job, but not those of the step. srun passes SLURM_UMASK to every task,
    while slurmstepd removes it from a batch script. SLURM_STEP_LAUNCHER_PORT exists in tasks of srun, but not
    in those of hpctrain's own launcher, which a batch script may start.
    """
    if (
        layout.num_tasks > 1
        and environ.get("ENVIRONMENT") == "BATCH"
        and "SLURM_STEP_LAUNCHER_PORT" in environ
        and "SLURM_UMASK" not in environ
    ):
        raise EnvironmentMismatch(
            f"There are {layout.num_tasks} tasks ({NUM_TASKS}), but this process runs in a batch script "
            "(ENVIRONMENT=BATCH, without SLURM_UMASK), which inherited the variables SLURM_STEP_* from the "
            "step that submitted it. Start the ranks with srun. To run a single process instead, set "
            f"{ENVIRONMENT_VARIABLE}=local. To run one of {layout.num_tasks} ranks, set "
            f"{ENVIRONMENT_VARIABLE}=slurm."
        )


def _check_tasks_here(rank: int, layout: StepLayout, environ: Mapping[str, str]) -> None:
    """Compare the rank and layout with SLURM_GTIDS, a separate list of this node's tasks."""
    text = environ.get("SLURM_GTIDS")
    if not text:
        return
    tasks = text.split(",")
    if str(rank) not in tasks:
        raise EnvironmentMismatch(
            f"Rank {rank} (SLURM_PROCID) is not among the tasks of this node (SLURM_GTIDS={text}). "
            f"{override_hint('local')}"
        )
    if len(tasks) != layout.num_tasks_here:
        raise EnvironmentMismatch(
            f"Node {layout.node} has {layout.num_tasks_here} tasks according to {TASKS}={environ[TASKS]} and "
            f"{HOSTS}={environ[HOSTS]}, but {len(tasks)} according to SLURM_GTIDS={text}. "
            f"{override_hint('local')}"
        )
