"""Ranks set by `horovodrun` with gloo. With MPI, `horovodrun` starts mpirun, which sets the ranks.

HOROVOD_CROSS_RANK and HOROVOD_CROSS_SIZE count only the nodes that have a process with the same local rank.
They are therefore valid node numbers only if all nodes have the same number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.cluster.env_variables import first_set, read_int
from hpctrain.cluster.mpi_launchers import LaunchedNodes, RankVariables, ranks_of, unknown_nodes_error
from hpctrain.cluster.ranks import Ranks

_NAMES = RankVariables(
    rank="HOROVOD_RANK",
    world_size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_world_size="HOROVOD_LOCAL_SIZE",
)
_NODE, _NUM_NODES = "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"
_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def detect(environ: Mapping[str, str]) -> Ranks | None:
    """Return the ranks that `horovodrun` assigned to this process, or None without such a launcher.

    Raises:
        EnvironmentMismatch: variables contradict each other, or there are several nodes and MASTER_ADDR or
            the node is unknown.
    """
    if not (environ.get(_NAMES.rank) or environ.get(_NAMES.world_size)):
        return None
    server = ":".join(environ.get(name, "") for name in _SERVER)
    key = (server, " and ".join(_SERVER))
    return ranks_of(environ, "horovod", _NAMES, key=key, nodes=lambda: _nodes(environ))


def _nodes(environ: Mapping[str, str]) -> LaunchedNodes:
    address = first_set(environ, "MASTER_ADDR")
    num_nodes = read_int(environ, _NUM_NODES)
    even = read_int(environ, _NAMES.world_size) == num_nodes * read_int(environ, _NAMES.local_world_size)
    if address is None or not even:
        raise unknown_nodes_error(
            "horovodrun",
            _NAMES,
            environ,
            f"Use the same number of slots on each of the {num_nodes} hosts ({_NUM_NODES}), and set "
            "MASTER_ADDR to the host of rank 0: MASTER_ADDR=HOST0 horovodrun -H HOST0:N,HOST1:N …",
        )
    sources = {"node_rank": _NODE, "num_nodes": _NUM_NODES, "master_addr": address}
    return LaunchedNodes(read_int(environ, _NODE), num_nodes, environ[address], sources)
