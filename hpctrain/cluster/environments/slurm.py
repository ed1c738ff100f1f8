"""Ranks inside a job step that `srun` started.

Only a *step* has ranks. A batch script, an `salloc` shell or an ssh session inside an allocation carry
many SLURM_* variables too, among them SLURM_PROCID=0 and the task count of the whole job; taking those
for ranks makes one process wait for peers that nobody starts. The mark of a step is SLURM_STEP_ID.

Only the step's own variables (SLURM_STEP_…) tell its shape: those of the job describe another one when a
step uses a part of it. SLURM_NODEID counts the nodes in the order of the components of a heterogeneous job,
whereas SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE are sorted by name: a node is found there by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.cluster.hostlist import expand_hostlist
from hpctrain.cluster.launched import master
from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.variables import ENVIRONMENT_VARIABLE, believe, read_int
from hpctrain.errors import EnvironmentMismatch

#: Step ids from here up are Slurm's own: batch script, external and interactive step (slurm.h).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_HOSTS, _TASKS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
_SHELLS = {"bash", "sh", "zsh", "fish", "tcsh", "csh", "ksh", "dash"}

_TASKS_PER_NODE = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def detect(environ: Mapping[str, str]) -> Ranks | None:
    """Ranks of this task of a job step, or None outside of one.

    Raises:
        EnvironmentMismatch: Slurm's variables contradict each other, are there only in part, or do not tell
            on which node rank 0 is.
    """
    if not environ.get("SLURM_PROCID"):
        return None
    rank = read_int(environ, "SLURM_PROCID")
    if not _in_step(environ):
        if rank:
            raise EnvironmentMismatch(
                f"rank {rank} (SLURM_PROCID) but no job step (SLURM_JOB_ID, SLURM_STEP_ID): a part of what "
                "srun sets got lost, in a container perhaps. Pass on all SLURM_* variables, or set "
                f"{ENVIRONMENT_VARIABLE}=local for a process that is alone."
            )
        return None
    world_size, node_rank = read_int(environ, "SLURM_STEP_NUM_TASKS"), read_int(environ, "SLURM_NODEID")
    hosts, tasks = _hosts_and_tasks(environ, world_size)
    _refuse_shell(environ, world_size)
    if not 0 <= node_rank < len(hosts):
        raise EnvironmentMismatch(
            f"node rank {node_rank} (SLURM_NODEID) but {len(hosts)} nodes ({_HOSTS}={environ[_HOSTS]}). "
            f"{believe('local')}"
        )
    by_node_rank, order = _in_order_of_node_ranks(environ, hosts)
    # The local launcher of the supervisor has nodes of one machine, which all have names of their own.
    name = environ.get("SLURMD_NODENAME", "")
    if name not in hosts:
        name = by_node_rank[node_rank]
    local_world_size = tasks[hosts.index(name)]
    _check_tasks_here(environ, rank, local_world_size)

    def main_host() -> tuple[str, str]:
        if len(hosts) > 1:
            _refuse_unknown_order(environ, rank, node_rank, name, by_node_rank)
        return by_node_rank[0], order

    array = environ.get("SLURM_ARRAY_JOB_ID", "")
    job = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    # Two clusters on the same hosts have jobs of the same number.
    key = f"{environ.get('SLURM_CLUSTER_NAME', '')}/{array}/{job}"
    of = "SLURM_CLUSTER_NAME, _ARRAY_JOB_ID, _JOB_ID, _STEP_ID and _RESTART_COUNT"
    address, port, meeting = master(environ, main_host, key, of)
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=read_int(environ, "SLURM_LOCALID"),
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=len(hosts),
        master_addr=address,
        master_port=port,
        environment="slurm",
        meeting_key=key,
        sources={
            "rank": "SLURM_PROCID",
            "world_size": "SLURM_STEP_NUM_TASKS",
            "local_rank": "SLURM_LOCALID",
            "local_world_size": _TASKS,
            "node_rank": "SLURM_NODEID",
            "num_nodes": _HOSTS,
            **meeting,
        },
    )


def parse_tasks_per_node(text: str, variable: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Tasks of each node, in the order of the node list, out of Slurm's notation `4(x2),3`.

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


def _in_step(environ: Mapping[str, str]) -> bool:
    return (
        bool(environ.get("SLURM_JOB_ID"))
        and bool(environ.get("SLURM_STEP_ID"))
        and read_int(environ, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP
    )


def _hosts_and_tasks(environ: Mapping[str, str], world_size: int) -> tuple[list[str], list[int]]:
    """Names of the step's nodes and how many tasks each has, in Slurm's order of names."""
    for name in (_HOSTS, _TASKS):
        if not environ.get(name):
            raise EnvironmentMismatch(
                f"{name} is not set, though SLURM_STEP_ID={environ['SLURM_STEP_ID']} is: a part of what "
                "srun sets got lost. Start with srun, or set "
                f"{ENVIRONMENT_VARIABLE}=local for a process that is alone."
            )
    hosts, tasks = expand_hostlist(environ[_HOSTS]), parse_tasks_per_node(environ[_TASKS], _TASKS)
    if sum(tasks) != world_size:
        raise EnvironmentMismatch(
            f"world size {world_size} (SLURM_STEP_NUM_TASKS) but {sum(tasks)} tasks on {len(tasks)} nodes "
            f"({_TASKS}={environ[_TASKS]}). {believe('local')}"
        )
    if len(hosts) != len(tasks):
        raise EnvironmentMismatch(
            f"{len(hosts)} nodes ({_HOSTS}={environ[_HOSTS]}) but task counts for {len(tasks)} "
            f"({_TASKS}={environ[_TASKS]}). {believe('local')}"
        )
    return hosts, tasks


def _refuse_shell(environ: Mapping[str, str], world_size: int) -> None:
    """Refuse to be rank 0 in a shell that `srun --pty --ntasks=4 bash` started: its peers ended at once."""
    if (
        world_size > 1
        and environ.get("SLURM_PTY_PORT")
        and environ["SLURM_STEP_ID"] == "0"
        and environ.get("SLURM_JOB_NAME") in _SHELLS
    ):
        raise EnvironmentMismatch(
            f"{world_size} tasks (SLURM_STEP_NUM_TASKS), but this is the terminal of an interactive "
            f"{environ['SLURM_JOB_NAME']} (SLURM_PTY_PORT, SLURM_JOB_NAME): the {world_size - 1} others that "
            "srun started have ended. Ask for --ntasks=1 there, start ranks with a further srun, or set "
            f"{ENVIRONMENT_VARIABLE}=local for a process that is alone, =slurm for one of {world_size}."
        )


def _in_order_of_node_ranks(environ: Mapping[str, str], hosts: list[str]) -> tuple[list[str], str]:
    """The names in the order in which SLURM_NODEID counts them, and the variables that tell it."""
    for kind in ("HET", "PACK"):
        prefix = f"SLURM_JOB_NODELIST_{kind}_GROUP_"
        groups = sorted(
            (int(name.removeprefix(prefix)), name)
            for name in environ
            if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
        )
        here = set(hosts)
        ordered = [host for _, name in groups for host in expand_hostlist(environ[name]) if host in here]
        if len(ordered) == len(hosts):
            return ordered, f"first of {prefix}* in {_HOSTS}"
    return hosts, f"first of {_HOSTS}"


def _check_tasks_here(environ: Mapping[str, str], rank: int, local_world_size: int) -> None:
    """Compare with the list of this node's tasks, which Slurm gives besides."""
    text = environ.get("SLURM_GTIDS")
    if not text:
        return
    tasks = text.split(",")
    if str(rank) not in tasks:
        raise EnvironmentMismatch(
            f"rank {rank} (SLURM_PROCID) is not among the tasks of this node (SLURM_GTIDS={text}). "
            f"{believe('local')}"
        )
    if len(tasks) != local_world_size:
        raise EnvironmentMismatch(
            f"{local_world_size} tasks on this node ({_TASKS}={environ[_TASKS]}, {_HOSTS}={environ[_HOSTS]}, "
            f"SLURMD_NODENAME={environ.get('SLURMD_NODENAME')}) but {len(tasks)} by SLURM_GTIDS={text}. "
            f"{believe('local')}"
        )


def _refuse_unknown_order(
    environ: Mapping[str, str], rank: int, node_rank: int, name: str, by_node_rank: list[str]
) -> None:
    """Refuse where the first of the list may not be rank 0's node."""
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        problem = "tasks are distributed by a host file (SLURM_DISTRIBUTION=arbitrary)"
        remedy = "the first name in SLURM_HOSTFILE"
    elif by_node_rank[node_rank] != name or (rank == 0 and node_rank != 0):
        problem = (
            f"rank {rank} is on {name}, node {node_rank} (SLURM_NODEID), where {_HOSTS} has "
            f"{by_node_rank[node_rank]}"
        )
        remedy = "the node of rank 0"
    else:
        return
    raise EnvironmentMismatch(
        f"Slurm's variables do not tell on which node rank 0 is: {problem}. Set MASTER_ADDR to {remedy}."
    )
