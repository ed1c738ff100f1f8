"""Ranks of a process whose launcher tells its place among all and on its node, and little about the nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpctrain.cluster.ports import port_candidates
from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.variables import first_of, read_int, read_port
from hpctrain.errors import EnvironmentMismatch

#: Where processes of one host meet.
LOOPBACK = "127.0.0.1"


def means_this_host(address: str) -> bool:
    """Whether `address` means the host of whoever asks."""
    return address == "localhost" or address.startswith(("127.", "::1"))


@dataclass(frozen=True)
class Names:
    """The variables in which a launcher tells a process its ranks."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


@dataclass(frozen=True)
class Nodes:
    """A process's node among those of the job, and rank 0's; with the source of each value."""

    node_rank: int
    num_nodes: int
    main: str
    """Host of rank 0."""
    sources: Mapping[str, str]
    """For `node_rank`, `num_nodes` and `master_addr`."""


def master(
    environ: Mapping[str, str], host: Callable[[], tuple[str, str]], key: str, of: str
) -> tuple[str, int, dict[str, str]]:
    """Address and port at which ranks meet, and their sources: what the environment says comes first.

    Args:
        environ: the variables of this process.
        host: rank 0's host and the source of it; asked only where MASTER_ADDR is not set.
        key: what the port is computed from; see `Ranks.meeting_key`.
        of: what `key` is made of, in words.
    """
    address_variable, port_variable = first_of(environ, "MASTER_ADDR"), first_of(environ, "MASTER_PORT")
    address, source = (environ[address_variable], address_variable) if address_variable else host()
    port = read_port(environ, port_variable) if port_variable else next(port_candidates(key))
    return address, port, {"master_addr": source, "master_port": port_variable or f"computed from {of}"}


def ranks_of(
    environ: Mapping[str, str],
    environment: str,
    names: Names,
    *,
    key: tuple[str, str],
    nodes: Callable[[], Nodes] | None = None,
) -> Ranks:
    """Ranks as `names` tell them.

    Args:
        environ: the variables of this process.
        environment: the name of the environment.
        names: its variables.
        key: what tells this set of processes from any other, and in words what that is made of.
        nodes: finds the node where there are several, or raises `unknown_nodes`.

    Raises:
        EnvironmentMismatch: variables contradict each other, are missing, or do not tell enough.
    """
    world_size, local_world_size = (
        read_int(environ, names.world_size),
        read_int(environ, names.local_world_size),
    )
    if local_world_size == world_size:
        why = f"{names.local_world_size} = {names.world_size}"
        sources = {"node_rank": why, "num_nodes": why, "master_addr": f"one node, since {why}"}
        place = Nodes(0, 1, LOOPBACK, sources)
    else:
        assert nodes is not None, f"{environment} has one node only"
        place = _given(environ) or nodes()
    text, of = key
    text = f"{environment}/{text}"
    address, port, meeting = master(environ, lambda: (place.main, place.sources["master_addr"]), text, of)
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
        meeting_key=text,
        sources={
            "rank": names.rank,
            "world_size": names.world_size,
            "local_rank": names.local_rank,
            "local_world_size": names.local_world_size,
            **place.sources,
            **meeting,
        },
    )


def unknown_nodes(launcher: str, names: Names, environ: Mapping[str, str], how: str) -> EnvironmentMismatch:
    """The error for ranks on several nodes of which it is not certain which is which.

    Args:
        launcher: its name, as the user knows it.
        names: its variables.
        environ: the variables of this process.
        how: what to do, as a sentence.
    """
    return EnvironmentMismatch(
        f"{launcher} started {environ[names.world_size]} ranks ({names.world_size}), "
        f"{environ[names.local_world_size]} of them on this node ({names.local_world_size}), but its "
        f"variables do not tell for certain which node this is, or on which rank 0 is. {how}"
    )


def _given(environ: Mapping[str, str]) -> Nodes | None:
    """The nodes as somebody told them in torch's variables, or None where one of these is missing."""
    node = first_of(environ, "NODE_RANK", "GROUP_RANK")
    if (
        node is None
        or first_of(environ, "GROUP_WORLD_SIZE") is None
        or first_of(environ, "MASTER_ADDR") is None
    ):
        return None
    return Nodes(
        read_int(environ, node),
        read_int(environ, "GROUP_WORLD_SIZE"),
        environ["MASTER_ADDR"],
        {"node_rank": node, "num_nodes": "GROUP_WORLD_SIZE", "master_addr": "MASTER_ADDR"},
    )
