"""Ranks from launchers that set global and local ranks, but little about the nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpctrain.cluster.env_variables import first_set, read_int, read_port
from hpctrain.cluster.ports import rendezvous_port
from hpctrain.cluster.ranks import Ranks
from hpctrain.errors import EnvironmentMismatch

#: Rendezvous address of processes on one host.
LOOPBACK = "127.0.0.1"


def is_local_address(address: str) -> bool:
    """True if `address` is the local host."""
    return address == "localhost" or address.startswith(("127.", "::1"))


@dataclass(frozen=True)
class RankVariables:
    """The variables of a launcher for the ranks of a process."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


@dataclass(frozen=True)
class LaunchedNodes:
    """The node of a process and the host of rank 0, with the source of each value."""

    node_rank: int
    num_nodes: int
    main: str
    """Host of rank 0."""
    sources: Mapping[str, str]
    """For `node_rank`, `num_nodes` and `master_addr`."""


def master_endpoint(
    environ: Mapping[str, str], host: Callable[[], tuple[str, str]], key: str, of: str
) -> tuple[str, int, dict[str, str]]:
    """Return the address and port of the rendezvous, and their sources. Variables take precedence."""
    address_variable, port_variable = first_set(environ, "MASTER_ADDR"), first_set(environ, "MASTER_PORT")
    address, source = (environ[address_variable], address_variable) if address_variable else host()
    port = read_port(environ, port_variable) if port_variable else rendezvous_port(key)
    return address, port, {"master_addr": source, "master_port": port_variable or f"computed from {of}"}


def ranks_of(
    environ: Mapping[str, str],
    environment: str,
    names: RankVariables,
    *,
    key: tuple[str, str],
    nodes: Callable[[], LaunchedNodes] | None = None,
) -> Ranks:
    """Return the ranks in the variables `names`."""
    world_size, local_world_size = (
        read_int(environ, names.world_size),
        read_int(environ, names.local_world_size),
    )
    if local_world_size == world_size:
        why = f"{names.local_world_size} = {names.world_size}"
        sources = {"node_rank": why, "num_nodes": why, "master_addr": f"one node, because {why}"}
        place = LaunchedNodes(0, 1, LOOPBACK, sources)
    else:
        assert nodes is not None, f"{environment} has only one node"
        place = _given(environ) or nodes()
    text, of = key
    text = f"{environment}/{text}"
    address, port, meeting = master_endpoint(
        environ, lambda: (place.main, place.sources["master_addr"]), text, of
    )
    return Ranks(
        rank=read_int(environ, names.rank),
        world_size=world_size,
        local_rank=read_int(environ, names.local_rank),
        local_world_size=local_world_size,
        node_rank=place.node_rank,
        num_nodes=place.num_nodes,
        master_addr=address,
        master_port=port,
        environment=environment,
        rendezvous_id=text,
        sources={
            "rank": names.rank,
            "world_size": names.world_size,
            "local_rank": names.local_rank,
            "local_world_size": names.local_world_size,
            **place.sources,
            **meeting,
        },
    )


def unknown_nodes_error(
    launcher: str, names: RankVariables, environ: Mapping[str, str], how: str
) -> EnvironmentMismatch:
    """Return the error for ranks on several nodes whose order is uncertain."""
    return EnvironmentMismatch(
        f"{launcher} started {environ[names.world_size]} ranks ({names.world_size}), "
        f"{environ[names.local_world_size]} of them on this node ({names.local_world_size}), but the "
        f"variables that it sets do not determine the rank of this node and the host of rank 0. {how}"
    )


def _given(environ: Mapping[str, str]) -> LaunchedNodes | None:
    """Return the nodes from torch's variables, or None if a variable is missing."""
    node = first_set(environ, "NODE_RANK", "GROUP_RANK")
    if (
        node is None
        or first_set(environ, "GROUP_WORLD_SIZE") is None
        or first_set(environ, "MASTER_ADDR") is None
    ):
        return None
    return LaunchedNodes(
        read_int(environ, node),
        read_int(environ, "GROUP_WORLD_SIZE"),
        environ["MASTER_ADDR"],
        {"node_rank": node, "num_nodes": "GROUP_WORLD_SIZE", "master_addr": "MASTER_ADDR"},
    )
