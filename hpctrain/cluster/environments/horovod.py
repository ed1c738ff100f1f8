"""Ranks that `horovodrun` gave, with gloo. With MPI it starts mpirun, which then gives them.

HOROVOD_CROSS_RANK and HOROVOD_CROSS_SIZE count only the nodes that have a rank of the same local rank. They
number the nodes where all nodes have equally many ranks; elsewhere they do not.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.cluster.launched import Names, Nodes, ranks_of, unknown_nodes
from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.variables import first_of, read_int

_NAMES = Names(
    rank="HOROVOD_RANK",
    world_size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_world_size="HOROVOD_LOCAL_SIZE",
)
_NODE, _NUM_NODES = "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"
_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def detect(environ: Mapping[str, str]) -> Ranks | None:
    """Ranks of this process of a `horovodrun`, or None outside of one.

    Raises:
        EnvironmentMismatch: variables contradict each other, or there are several nodes and MASTER_ADDR or
            the node is not known.
    """
    if not (environ.get(_NAMES.rank) or environ.get(_NAMES.world_size)):
        return None
    server = ":".join(environ.get(name, "") for name in _SERVER)
    key = (server, " and ".join(_SERVER))
    return ranks_of(environ, "horovod", _NAMES, key=key, nodes=lambda: _nodes(environ))


def _nodes(environ: Mapping[str, str]) -> Nodes:
    address = first_of(environ, "MASTER_ADDR")
    num_nodes = read_int(environ, _NUM_NODES)
    even = read_int(environ, _NAMES.world_size) == num_nodes * read_int(environ, _NAMES.local_world_size)
    if address is None or not even:
        raise unknown_nodes(
            "horovodrun",
            _NAMES,
            environ,
            f"Give every host the same number of slots ({_NUM_NODES} is {num_nodes}), and say where rank 0 "
            "is: MASTER_ADDR=HOST0 horovodrun -H HOST0:N,HOST1:N …",
        )
    sources = {"node_rank": _NODE, "num_nodes": _NUM_NODES, "master_addr": address}
    return Nodes(read_int(environ, _NODE), num_nodes, environ[address], sources)
