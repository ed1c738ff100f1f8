"""Ranks set by Hydra, the `mpiexec` of MPICH, Intel MPI and related libraries.

PMI_RANK and PMI_SIZE do not identify Hydra, because `srun --mpi=pmi2` also sets them, to the values of the
step. MPI_LOCALRANKID identifies Hydra. In a Slurm job, Hydra starts a proxy on each node with an srun of one
task per node. SLURM_PROCID and related variables then describe the proxy, and SLURM_NODEID is the node.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.cluster.env_variables import read_hosts, read_int
from hpctrain.cluster.mpi_launchers import LaunchedNodes, RankVariables, ranks_of, unknown_nodes_error
from hpctrain.cluster.ranks import Ranks

_NAMES = RankVariables(
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
)
_STEP = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")


def detect(environ: Mapping[str, str]) -> Ranks | None:
    """Return the ranks that `mpiexec` assigned to this process, or None without such a launcher.

    Raises:
        EnvironmentMismatch: variables contradict each other, or there are several nodes in unknown order.
    """
    if not (environ.get(_NAMES.rank) and environ.get(_NAMES.local_rank)):
        return None
    # Hydra sets no run id. Two runs that start at the same time in the same folder compute the same port;
    # their ranks 0 detect each other in the rendezvous.
    if environ.get("SLURM_STEP_ID"):
        step = "/".join(environ.get(name, "") for name in _STEP)
        key = (step, ", ".join(_STEP))
    else:
        key = (f"{environ.get('PWD', '')}/{environ.get(_NAMES.world_size)}", f"PWD and {_NAMES.world_size}")
    return ranks_of(environ, "mpich", _NAMES, key=key, nodes=lambda: _nodes(environ))


def _nodes(environ: Mapping[str, str]) -> LaunchedNodes:
    found = _nodes_of_proxies(environ)
    if found is None or (read_int(environ, _NAMES.rank) == 0 and found.node_rank != 0):
        raise unknown_nodes_error(
            "mpiexec",
            _NAMES,
            environ,
            "Start the script with srun, or pass the missing variables: mpiexec -hosts HOST0,HOST1 -genv "
            "MASTER_ADDR HOST0 "
            "-genv GROUP_WORLD_SIZE 2 -n N -env NODE_RANK 0 PROGRAM : -n N -env NODE_RANK 1 PROGRAM.",
        )
    return found


def _nodes_of_proxies(environ: Mapping[str, str]) -> LaunchedNodes | None:
    """Return the nodes of the step in which Hydra's proxies run, or None without such a step."""
    num_nodes = environ.get("SLURM_STEP_NUM_NODES")
    if not num_nodes or environ.get("SLURM_STEP_NUM_TASKS") != num_nodes:
        return None
    return LaunchedNodes(
        read_int(environ, "SLURM_NODEID"),
        read_int(environ, "SLURM_STEP_NUM_NODES"),
        read_hosts(environ, "SLURM_STEP_NODELIST")[0],
        {
            "node_rank": "SLURM_NODEID",
            "num_nodes": "SLURM_STEP_NUM_NODES",
            "master_addr": "first of SLURM_STEP_NODELIST",
        },
    )
