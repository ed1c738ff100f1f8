"""Ranks set by Open MPI's `mpirun`.

It sets the global and local ranks, but little about the nodes. Despite its name OMPI_COMM_WORLD_NODE_RANK is
not the index of the node, but the index of the process on its node. The index of the node follows from
Slurm's node list in a Slurm job, otherwise from the number of the daemon that started the process
(OMPI_MCA_orte_local_daemon_uri; mpirun itself is daemon 0). Both are valid only if all nodes are used:
neither shows idle nodes.

Based on Open MPI 4.1. Version 5 sets no OMPI_MCA_orte_* variables, which does not matter on a single node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.cluster.env_variables import first_set, override_hint, read_hosts, read_int
from hpctrain.cluster.mpi_launchers import LaunchedNodes, RankVariables, ranks_of, unknown_nodes_error
from hpctrain.cluster.ranks import Ranks
from hpctrain.errors import EnvironmentMismatch

_NAMES = RankVariables(
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
_NUM_NODES = "OMPI_MCA_orte_num_nodes"
_NUM_DAEMONS = "OMPI_MCA_ess_base_num_procs"
_DAEMON = "OMPI_MCA_orte_local_daemon_uri"
_MPIRUN = "OMPI_MCA_orte_hnp_uri"
_NUM_PROCESSES = "OMPI_MCA_orte_ess_num_procs"

# Example: 1669005312.1;tcp://10.0.0.2,192.168.0.2:41441;tcp6://[fd00::2]:43493
_DAEMON_NUMBER = re.compile(r"\d+\.(\d+);")
_ADDRESS = re.compile(r"tcp://(\d+\.\d+\.\d+\.\d+)")


def detect(environ: Mapping[str, str]) -> Ranks | None:
    """Return the ranks that `mpirun` assigned to this process, or None without such a launcher.

    Raises:
        EnvironmentMismatch: variables contradict each other, or there are several nodes in unknown order.
    """
    if not (environ.get(_NAMES.rank) or environ.get(_NAMES.world_size)):
        return None
    world_size = read_int(environ, _NAMES.world_size)
    if environ.get(_NUM_PROCESSES) and read_int(environ, _NUM_PROCESSES) != world_size:
        raise EnvironmentMismatch(
            f"The world size is {world_size} ({_NAMES.world_size}), but the number of processes is "
            f"{environ[_NUM_PROCESSES]} ({_NUM_PROCESSES}). {override_hint('slurm', 'local')}"
        )
    job = first_set(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID")
    return ranks_of(
        environ,
        "openmpi",
        _NAMES,
        key=(environ[job] if job else "", job or "only the port range"),
        nodes=lambda: _nodes(environ),
    )


def started_by_orted(environ: Mapping[str, str]) -> bool:
    """True if an mpirun daemon, which is a job step under Slurm, started this process."""
    return _daemon_number(environ) > 0


def _nodes(environ: Mapping[str, str]) -> LaunchedNodes:
    found = _nodes_of_slurm_job(environ) if environ.get("SLURM_JOB_NODELIST") else _nodes_by_daemon(environ)
    if found is None or (read_int(environ, _NAMES.rank) == 0 and found.node_rank != 0):
        raise unknown_nodes_error(
            "mpirun",
            _NAMES,
            environ,
            "Start mpirun on one of the nodes, with ranks on all nodes and rank 0 on the first node. "
            "Alternatively, start the script with srun, or pass the missing variables to each node: "
            "mpirun -n N -x MASTER_ADDR=HOST0 -x GROUP_WORLD_SIZE=2 -x NODE_RANK=0 PROGRAM : "
            "-n N -x … -x NODE_RANK=1 PROGRAM.",
        )
    return found


def _nodes_of_slurm_job(environ: Mapping[str, str]) -> LaunchedNodes | None:
    hosts = read_hosts(environ, "SLURM_JOB_NODELIST")
    name = environ.get("SLURMD_NODENAME")
    if name not in hosts or environ.get(_NUM_NODES) != str(len(hosts)):
        return None
    return LaunchedNodes(
        hosts.index(name),
        len(hosts),
        hosts[0],
        {
            "node_rank": "SLURMD_NODENAME in SLURM_JOB_NODELIST",
            "num_nodes": _NUM_NODES,
            "master_addr": "first of SLURM_JOB_NODELIST",
        },
    )


def _nodes_by_daemon(environ: Mapping[str, str]) -> LaunchedNodes | None:
    number, address = _daemon_number(environ), _ADDRESS.search(environ.get(_MPIRUN, ""))
    # Children of mpirun itself have no variables of the daemons. These processes are on the first node, which
    # is then in use.
    if number < 0 or address is None or (number and environ.get(_NUM_DAEMONS) != environ.get(_NUM_NODES)):
        return None
    return LaunchedNodes(
        number,
        read_int(environ, _NUM_NODES),
        address[1],
        {
            "node_rank": f"number in {_DAEMON}",
            "num_nodes": _NUM_NODES,
            "master_addr": f"address in {_MPIRUN}",
        },
    )


def _daemon_number(environ: Mapping[str, str]) -> int:
    match = _DAEMON_NUMBER.match(environ.get(_DAEMON, ""))
    return int(match[1]) if match else -1
