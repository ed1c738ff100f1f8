"""The nodes of a job step and its tasks on each, as srun tells them to a task.

SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE are sorted by the nodes' names. SLURM_NODEID is not where a
heterogeneous job is: it counts component by component. So a node is found in the lists by its name, and the
order of SLURM_NODEID is put together from the components' own lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.cluster.variables import ENVIRONMENT_VARIABLE, believe, read_hosts, read_int
from hpctrain.errors import EnvironmentMismatch

HOSTS, TASKS, NUM_TASKS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"

_TASKS_PER_NODE = re.compile(r"(\d+)(?:\(x(\d+)\))?")
#: A heterogeneous job names the nodes of each component so; the older name is the one that srun itself sets.
_COMPONENTS = ("SLURM_JOB_NODELIST_HET_GROUP_", "SLURM_JOB_NODELIST_PACK_GROUP_")


@dataclass(frozen=True)
class StepLayout:
    """Who runs where in a job step."""

    tasks: Mapping[str, int]
    """How many tasks each node has, by its name."""
    nodes: list[str]
    """Names of the nodes as SLURM_NODEID counts them."""
    source: str
    """The variables that `nodes` is made of."""
    node_rank: int
    """This task's node among `nodes`."""
    node: str
    """Its name."""

    @property
    def num_tasks(self) -> int:
        return sum(self.tasks.values())

    @property
    def num_tasks_here(self) -> int:
        return self.tasks[self.node]

    def host_of_main(self, rank: int, environ: Mapping[str, str]) -> str:
        """The node of rank 0, for the task of number `rank`.

        Raises:
            EnvironmentMismatch: Slurm's variables do not tell.
        """
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
            f"Slurm's variables do not tell on which node rank 0 is: {problem}. Set MASTER_ADDR to {remedy}."
        )


def read_layout(environ: Mapping[str, str]) -> StepLayout:
    """The layout of the step that this task is of.

    Raises:
        EnvironmentMismatch: the variables contradict each other, or a part of them is missing.
    """
    for name in (HOSTS, TASKS):
        if not environ.get(name):
            raise EnvironmentMismatch(
                f"{name} is not set, though SLURM_STEP_ID={environ.get('SLURM_STEP_ID')} is: a part of what "
                "srun sets got lost. Start with srun, or set "
                f"{ENVIRONMENT_VARIABLE}=local for a process that is alone."
            )
    hosts, counts = read_hosts(environ, HOSTS), parse_tasks_per_node(environ[TASKS], TASKS)
    num_tasks, node_rank = read_int(environ, NUM_TASKS), read_int(environ, "SLURM_NODEID")
    if sum(counts) != num_tasks:
        raise EnvironmentMismatch(
            f"world size {num_tasks} ({NUM_TASKS}) but {sum(counts)} tasks on {len(counts)} nodes "
            f"({TASKS}={environ[TASKS]}). {believe('local')}"
        )
    if len(hosts) != len(counts):
        raise EnvironmentMismatch(
            f"{len(hosts)} nodes ({HOSTS}={environ[HOSTS]}) but task counts for {len(counts)} "
            f"({TASKS}={environ[TASKS]}). {believe('local')}"
        )
    if not 0 <= node_rank < len(hosts):
        raise EnvironmentMismatch(
            f"node rank {node_rank} (SLURM_NODEID) but {len(hosts)} nodes ({HOSTS}={environ[HOSTS]}). "
            f"{believe('local')}"
        )
    node = hosts[0] if len(hosts) == 1 else environ.get("SLURMD_NODENAME", "")
    if node not in hosts:
        raise EnvironmentMismatch(
            f"SLURMD_NODENAME is {node!r}, which is none of the step's nodes ({HOSTS}={environ[HOSTS]}). "
            f"Pass on what srun sets, SLURMD_NODENAME included. {believe('local')}"
        )
    nodes, source = _in_order_of_node_ranks(environ, hosts)
    return StepLayout(dict(zip(hosts, counts, strict=True)), nodes, source, node_rank, node)


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


def _in_order_of_node_ranks(environ: Mapping[str, str], hosts: list[str]) -> tuple[list[str], str]:
    """The names as SLURM_NODEID counts them, and the variables that tell it."""
    here = set(hosts)
    for prefix in _COMPONENTS:
        numbers = [name.removeprefix(prefix) for name in environ if name.startswith(prefix)]
        components = sorted((number for number in numbers if number.isdecimal()), key=int)
        ordered = [host for n in components for host in read_hosts(environ, f"{prefix}{n}") if host in here]
        if len(ordered) == len(hosts):
            return ordered, f"{prefix}* in {HOSTS}"
    return hosts, HOSTS
