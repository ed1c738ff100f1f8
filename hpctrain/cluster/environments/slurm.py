"""Ranks inside a job step that `srun` started.

Only a *step* has ranks. A batch script, an `salloc` shell or an ssh session inside an allocation carry
many SLURM_* variables too, among them SLURM_PROCID=0 and the task count of the whole job; taking those
for ranks makes one process wait for peers that nobody starts. The mark of a step is SLURM_STEP_ID.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.cluster.hostlist import expand_hostlist
from hpctrain.cluster.ports import port_candidates
from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.variables import first_of, read_int
from hpctrain.errors import EnvironmentMismatch

#: Step ids from here up are Slurm's own: batch script, external and interactive step (slurm.h).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

_TASKS_PER_NODE = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def detect(environ: Mapping[str, str]) -> Ranks | None:
    """Ranks of this task of a job step, or None outside of one.

    Raises:
        EnvironmentMismatch: Slurm's variables contradict each other.
    """
    if not environ.get("SLURM_JOB_ID") or not environ.get("SLURM_STEP_ID") or "SLURM_PROCID" not in environ:
        return None
    if read_int(environ, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return None
    # The step's own variables first: those of the job describe another shape when a step uses a part of it.
    tasks_var = (
        first_of(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") or "SLURM_STEP_NUM_TASKS"
    )
    per_node_var = first_of(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    hosts_var = first_of(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    if per_node_var is None or hosts_var is None:
        raise EnvironmentMismatch(
            "SLURM_STEP_TASKS_PER_NODE or SLURM_STEP_NODELIST is not set, though SLURM_STEP_ID is. "
            "Start with srun."
        )
    world_size = read_int(environ, tasks_var)
    tasks = parse_tasks_per_node(environ[per_node_var], per_node_var)
    hosts = expand_hostlist(environ[hosts_var])
    node_rank = read_int(environ, "SLURM_NODEID")
    if sum(tasks) != world_size:
        raise EnvironmentMismatch(
            f"world size {world_size} ({tasks_var}) but {sum(tasks)} tasks on {len(tasks)} nodes "
            f"({per_node_var}={environ[per_node_var]}). Submit with --ntasks-per-node instead of --ntasks, "
            "or unset what is left over."
        )
    if len(hosts) != len(tasks):
        raise EnvironmentMismatch(
            f"{len(hosts)} nodes ({hosts_var}={environ[hosts_var]}) but task counts for {len(tasks)} "
            f"({per_node_var}={environ[per_node_var]}). Unset what an outer job left behind."
        )
    if not 0 <= node_rank < len(tasks):
        raise EnvironmentMismatch(
            f"node rank {node_rank} (SLURM_NODEID) but only {len(tasks)} nodes ({hosts_var})."
        )
    key = _meeting_key(environ)
    address_var, port_var = first_of(environ, "MASTER_ADDR"), first_of(environ, "MASTER_PORT")
    return Ranks(
        rank=read_int(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=read_int(environ, "SLURM_LOCALID"),
        local_world_size=tasks[node_rank],
        node_rank=node_rank,
        num_nodes=len(tasks),
        master_addr=environ[address_var] if address_var else hosts[0],
        master_port=read_int(environ, port_var) if port_var else next(port_candidates(key)),
        environment="slurm",
        meeting_key=key,
        sources={
            "rank": "SLURM_PROCID",
            "world_size": tasks_var,
            "local_rank": "SLURM_LOCALID",
            "local_world_size": per_node_var,
            "node_rank": "SLURM_NODEID",
            "num_nodes": per_node_var,
            "master_addr": address_var or f"first of {hosts_var}",
            "master_port": port_var or "computed from SLURM_JOB_ID and SLURM_STEP_ID",
        },
    )


def parse_tasks_per_node(text: str, variable: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Tasks of each node, in node order, out of Slurm's notation `4(x2),3`.

    Raises:
        EnvironmentMismatch: the text is not of that form.
    """
    counts: list[int] = []
    for piece in text.split(","):
        match = _TASKS_PER_NODE.fullmatch(piece.strip())
        if match is None:
            raise EnvironmentMismatch(
                f"{variable} is {text!r}; {piece!r} in it is not of Slurm's form 4(x2),3."
            )
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def _meeting_key(environ: Mapping[str, str]) -> str:
    """What every rank of a step knows alike, and no other step shares: array, job, step and restart."""
    array = environ.get("SLURM_ARRAY_JOB_ID", "")
    job, step = environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"]
    return f"{array}/{job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')}"
