"""The nodes of a job step and the tasks on each node, from the variables that srun sets for a task.

SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE are sorted by node name. In a heterogeneous job,
SLURM_NODEID counts component by component instead. Therefore, a node is looked up by name, and the order of
SLURM_NODEID is assembled from the lists of the components.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.cluster.env_variables import ENVIRONMENT_VARIABLE, override_hint, read_hosts, read_int
from hpctrain.cluster.hostlist import MAX_NAMES
from hpctrain.errors import EnvironmentMismatch
from hpctrain.text import is_count

HOSTS, TASKS, NUM_TASKS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"

#: No node has a million tasks.
_TASKS_PER_NODE = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
#: Node lists of the components of a heterogeneous job; srun itself sets the older name.
_COMPONENTS = ("SLURM_JOB_NODELIST_HET_GROUP_", "SLURM_JOB_NODELIST_PACK_GROUP_")


@dataclass(frozen=True)
class StepLayout:
    """The distribution of a job step's tasks to nodes."""

    tasks: Mapping[str, int]
    """Number of tasks per node name."""
    nodes: list[str]
    """Names of the nodes in the order of SLURM_NODEID."""
    source: str
    """The variables that give `nodes`."""
    node_rank: int
    """Index in `nodes` of this task's node."""
    node: str
    """Name of this task's node."""

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
    if sum(counts) != num_tasks:
        raise EnvironmentMismatch(
            f"The world size is {num_tasks} ({NUM_TASKS}), but there are {sum(counts)} tasks on "
            f"{len(counts)} nodes ({TASKS}={environ[TASKS]}). {override_hint('local')}"
        )
    if len(hosts) != len(counts):
        raise EnvironmentMismatch(
            f"The step has {len(hosts)} nodes ({HOSTS}={environ[HOSTS]}), but there are task counts for "
            f"{len(counts)} nodes ({TASKS}={environ[TASKS]}). {override_hint('local')}"
        )
    if not 0 <= node_rank < len(hosts):
        raise EnvironmentMismatch(
            f"The node rank is {node_rank} (SLURM_NODEID), but there are {len(hosts)} nodes "
            f"({HOSTS}={environ[HOSTS]}). "
            f"{override_hint('local')}"
        )
    node = hosts[0] if len(hosts) == 1 else environ.get("SLURMD_NODENAME", "")
    if node not in hosts:
        raise EnvironmentMismatch(
            f"SLURMD_NODENAME is {node!r}, which is not a node of the step ({HOSTS}={environ[HOSTS]}). "
            f"Keep all variables that srun sets, including SLURMD_NODENAME. {override_hint('local')}"
        )
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
    here = set(hosts)
    for prefix in _COMPONENTS:
        numbers = [name.removeprefix(prefix) for name in environ if name.startswith(prefix)]
        components = sorted((number for number in numbers if is_count(number)), key=int)
        ordered = [host for n in components for host in read_hosts(environ, f"{prefix}{n}") if host in here]
        if len(ordered) == len(hosts):
            return ordered, f"{prefix}* in {HOSTS}"
    return hosts, HOSTS
