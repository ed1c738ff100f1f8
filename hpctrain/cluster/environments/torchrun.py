"""Ranks from the variables that torchrun sets, and that `env://` scripts are started with by hand."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.variables import first_of, read_int
from hpctrain.errors import EnvironmentMismatch

_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def detect(environ: Mapping[str, str]) -> Ranks | None:
    """Ranks that torchrun (or a launcher that speaks its language) gave, or None without RANK and WORLD_SIZE.

    Raises:
        EnvironmentMismatch: a part of the variables is missing, or they contradict each other.
    """
    if not ("RANK" in environ and "WORLD_SIZE" in environ):
        return None
    missing = [name for name in _REQUIRED if not environ.get(name)]
    if missing:
        raise EnvironmentMismatch(
            f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} are set, but not "
            f"{', '.join(missing)}. Start with torchrun, or unset RANK and WORLD_SIZE for a single process."
        )
    world_size = read_int(environ, "WORLD_SIZE")
    local_var = first_of(environ, "LOCAL_WORLD_SIZE")
    local_world_size = read_int(environ, local_var) if local_var else world_size
    node_var = first_of(environ, "GROUP_RANK", "NODE_RANK")
    if node_var:
        node_rank, node_source = read_int(environ, node_var), node_var
    else:
        node_rank, node_source = (
            read_int(environ, "RANK") // max(local_world_size, 1),
            "RANK / LOCAL_WORLD_SIZE",
        )
    nodes_var = first_of(environ, "GROUP_WORLD_SIZE")
    return Ranks(
        rank=read_int(environ, "RANK"),
        world_size=world_size,
        local_rank=read_int(environ, "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=read_int(environ, nodes_var) if nodes_var else -(-world_size // max(local_world_size, 1)),
        master_addr=environ["MASTER_ADDR"],
        master_port=read_int(environ, "MASTER_PORT"),
        environment="torchrun",
        sources={
            "rank": "RANK",
            "world_size": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "local_world_size": local_var or "WORLD_SIZE",
            "node_rank": node_source,
            "num_nodes": nodes_var or "WORLD_SIZE / LOCAL_WORLD_SIZE",
            "master_addr": "MASTER_ADDR",
            "master_port": "MASTER_PORT",
        },
    )
