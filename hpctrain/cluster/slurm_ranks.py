"""Detect the ranks of a job step started by `srun`.

Only a *step*, which SLURM_STEP_ID identifies, has ranks. A batch script, an `salloc` shell or an ssh session
inside an allocation has many SLURM_* variables, too, among them SLURM_PROCID=0 and the task count of the job.

Only the variables of the step (SLURM_STEP_…) describe its layout; those of the job differ if the step uses
only a part of the job. SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE are sorted by node name. In a
heterogeneous job, SLURM_NODEID counts component by component instead. Therefore, a node is looked up by name,
and the order of SLURM_NODEID is assembled from the lists of the components.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.cluster.env_variables import (
    ENVIRONMENT_VARIABLE,
    override_hint,
    read_hosts,
    read_int,
)
from hpctrain.cluster.hostlist import MAX_NAMES
from hpctrain.cluster.master_address import master_endpoint
from hpctrain.cluster.ranks import Ranks
from hpctrain.errors import EnvironmentMismatch
from hpctrain.text import is_count

HOSTS, TASKS, NUM_TASKS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"

#: Step ids from this number are reserved by Slurm: batch script, external and interactive step (slurm.h).
#: Slurm 26.05 prints them as negative numbers, and sets them in the batch script as well.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
#: No node has a million tasks.
_TASKS_PER_NODE = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
#: Node lists of the components of a heterogeneous job; srun itself sets the older name.
_COMPONENTS = ("SLURM_JOB_NODELIST_HET_GROUP_", "SLURM_JOB_NODELIST_PACK_GROUP_")
_SHELLS = {"bash", "sh", "zsh", "fish", "tcsh", "csh", "ksh", "dash"}


def detect_slurm(environ: Mapping[str, str]) -> Ranks | None:
    """Return the ranks of this task of a job step, or None outside a job step."""
    if not environ.get("SLURM_PROCID"):
        return None
    rank = read_int(environ, "SLURM_PROCID")
    has_ids = environ.get("SLURM_JOB_ID") and environ.get("SLURM_STEP_ID")
    if not has_ids or not 0 <= read_int(environ, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP:
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
    address, port, endpoint_sources = master_endpoint(
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
            **endpoint_sources,
        },
    )


def _key(environ: Mapping[str, str]) -> str:
    """Return an identifier of the step, equal on all of its ranks and different in other steps."""
    # Clusters that share hosts may have jobs with the same number.
    names = ("SLURM_CLUSTER_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    cluster, array, job, step = (environ.get(name, "") for name in names)
    return f"{cluster}/{array}/{job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')}"


def _refuse_shell(layout: StepLayout, environ: Mapping[str, str]) -> None:
    """Reject rank 0 in step 0 of `srun --pty --ntasks=4 bash`, a shell whose peers exited immediately."""
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
    tasks, problem = text.split(","), ""
    if str(rank) not in tasks:
        problem = f"Rank {rank} (SLURM_PROCID) is not among the tasks of this node (SLURM_GTIDS={text})"
    elif len(tasks) != layout.num_tasks_here:
        problem = (
            f"Node {layout.node} has {layout.num_tasks_here} tasks according to {TASKS}={environ[TASKS]} "
        )
        problem += f"and {HOSTS}={environ[HOSTS]}, but {len(tasks)} according to SLURM_GTIDS={text}"
    if problem:
        raise EnvironmentMismatch(f"{problem}. {override_hint('local')}")


@dataclass(frozen=True)
class StepLayout:
    """The distribution of a job step's tasks to nodes."""

    tasks: Mapping[str, int]
    nodes: list[str]
    """Names of the nodes in the order of SLURM_NODEID."""
    source: str
    """The variables that give `nodes`."""
    node_rank: int
    node: str

    @property
    def num_tasks(self) -> int:
        return sum(self.tasks.values())

    @property
    def num_tasks_here(self) -> int:
        return self.tasks[self.node]

    def host_of_main(self, rank: int, environ: Mapping[str, str]) -> str:
        """Return the node of rank 0, for task `rank`."""
        if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") and len(self.nodes) > 1:
            problem = "tasks are distributed by a host file (SLURM_DISTRIBUTION=arbitrary)"
            remedy = "the first name in SLURM_HOSTFILE"
        elif self.nodes[self.node_rank] != self.node or (rank == 0 and self.node_rank != 0):
            problem = (
                f"rank {rank} is on {self.node} (SLURMD_NODENAME), node {self.node_rank} (SLURM_NODEID) of "
                f"{','.join(self.nodes[:8])}{'…' if self.nodes[8:] else ''} ({self.source})"
            )
            remedy = "the node of rank 0"
        else:
            return self.nodes[0]
        raise EnvironmentMismatch(
            f"Slurm's variables do not determine the node of rank 0: {problem}. Set MASTER_ADDR to {remedy}."
        )


def read_layout(environ: Mapping[str, str]) -> StepLayout:
    """Return the layout of this task's step."""
    for name in (HOSTS, TASKS):
        if not environ.get(name):
            raise EnvironmentMismatch(
                f"{name} is not set, although SLURM_STEP_ID={environ.get('SLURM_STEP_ID')} is. A "
                "container may have removed variables that srun sets. Pass all SLURM_* variables to the "
                f"container, or set {ENVIRONMENT_VARIABLE}=local to run a single process."
            )
    hosts, counts = read_hosts(environ, HOSTS), parse_tasks_per_node(environ[TASKS], TASKS)
    num_tasks, node_rank = read_int(environ, NUM_TASKS), read_int(environ, "SLURM_NODEID")
    node = hosts[0] if len(hosts) == 1 else environ.get("SLURMD_NODENAME", "")
    listed, tasks, problem = f"{HOSTS}={environ[HOSTS]}", f"{TASKS}={environ[TASKS]}", ""
    if sum(counts) != num_tasks:
        problem = f"The world size is {num_tasks} ({NUM_TASKS}), but there are {sum(counts)} tasks on "
        problem += f"{len(counts)} nodes ({tasks})"
    elif len(hosts) != len(counts):
        problem = f"The step has {len(hosts)} nodes ({listed}), but there are task counts for "
        problem += f"{len(counts)} nodes ({tasks})"
    elif not 0 <= node_rank < len(hosts):
        problem = f"The node rank is {node_rank} (SLURM_NODEID), but there are {len(hosts)} nodes ({listed})"
    elif node not in hosts:
        problem = f"SLURMD_NODENAME is {node!r}, which is not a node of the step ({listed}). "
        problem += "Keep all variables that srun sets, including SLURMD_NODENAME"
    if problem:
        raise EnvironmentMismatch(f"{problem}. {override_hint('local')}")
    nodes, source = _in_order_of_node_ranks(environ, hosts)
    return StepLayout(dict(zip(hosts, counts, strict=True)), nodes, source, node_rank, node)


def parse_tasks_per_node(text: str, variable: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Return the tasks of each node, in the order of the node list, from Slurm's notation `4(x2),3`."""
    counts: list[int] = []
    for piece in text.split(","):
        match = _TASKS_PER_NODE.fullmatch(piece.strip())
        if match is None:
            raise EnvironmentMismatch(
                f"{variable} is {text!r}, but {piece!r} is not a task count. Example of a valid value: "
                "4(x2),3."
            )
        num_nodes = int(match[2] or 1)
        if len(counts) + num_nodes > MAX_NAMES:
            raise EnvironmentMismatch(
                f"{variable} is {text[:50]!r}…, which is more than {MAX_NAMES:,} nodes. Correct the variable."
            )
        counts.extend([int(match[1])] * num_nodes)
    return counts


def _in_order_of_node_ranks(environ: Mapping[str, str], hosts: list[str]) -> tuple[list[str], str]:
    """Return the node names in the order of SLURM_NODEID, and the variables that determine it."""
    step_hosts = set(hosts)
    for prefix in _COMPONENTS:
        numbers = [name.removeprefix(prefix) for name in environ if name.startswith(prefix)]
        components = sorted((number for number in numbers if is_count(number)), key=int)
        ordered = [
            host for n in components for host in read_hosts(environ, f"{prefix}{n}") if host in step_hosts
        ]
        if len(ordered) == len(hosts):
            return ordered, f"{prefix}* in {HOSTS}"
    return hosts, HOSTS
