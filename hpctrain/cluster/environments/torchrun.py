"""Ranks in torch's own variables, as torchrun sets them, and whoever speaks its language."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.cluster.launched import means_this_host
from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.variables import first_of, read_int, read_port
from hpctrain.errors import EnvironmentMismatch

# What `torchrun --standalone` calls its run. Its MASTER_ADDR is the host's full name, as that of any other.
_STANDALONE = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: Only torchrun sets it. The other variables may be anybody's: a container's, a shell's, an outer job's.
MARK = "TORCHELASTIC_RUN_ID"

#: What a launcher that speaks its language has to set, besides NODE_RANK where there are several nodes.
REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def detect(environ: Mapping[str, str]) -> Ranks | None:
    """Ranks that torchrun (or a launcher that speaks its language) gave, or None without RANK and WORLD_SIZE.

    RANK=0 and WORLD_SIZE=1 without the others are no ranks of anything.

    Raises:
        EnvironmentMismatch: a part of the variables is missing, or they contradict each other.
    """
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        return None
    world_size = read_int(environ, "WORLD_SIZE")
    missing = [name for name in REQUIRED if not environ.get(name)]
    if missing == ["LOCAL_WORLD_SIZE"] and means_this_host(environ["MASTER_ADDR"]):
        missing = []
    if missing and world_size == 1:
        return None
    local_world_size = read_int(environ, first_of(environ, "LOCAL_WORLD_SIZE") or "WORLD_SIZE")
    node_variable = first_of(environ, "GROUP_RANK", "NODE_RANK")
    if local_world_size != world_size and node_variable is None:
        missing.append("NODE_RANK")
    if missing:
        raise EnvironmentMismatch(
            f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} are set, but not "
            f"{', '.join(missing)}. Start with torchrun, or unset RANK and WORLD_SIZE for a single process."
        )
    nodes_variable = first_of(environ, "GROUP_WORLD_SIZE")
    return Ranks(
        rank=read_int(environ, "RANK"),
        world_size=world_size,
        local_rank=read_int(environ, "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=read_int(environ, node_variable) if node_variable else 0,
        num_nodes=read_int(environ, nodes_variable)
        if nodes_variable
        else -(-world_size // max(1, local_world_size)),
        master_addr=environ["MASTER_ADDR"],
        master_port=read_port(environ, "MASTER_PORT"),
        environment="torchrun",
        meeting_key=f"torchrun/{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
        sources={
            "rank": "RANK",
            "world_size": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "local_world_size": first_of(environ, "LOCAL_WORLD_SIZE")
            or "WORLD_SIZE, all on this host (MASTER_ADDR)",
            "node_rank": node_variable or "LOCAL_WORLD_SIZE = WORLD_SIZE",
            "num_nodes": nodes_variable or "WORLD_SIZE / LOCAL_WORLD_SIZE",
            "master_addr": "MASTER_ADDR",
            "master_port": "MASTER_PORT",
        },
    )


def is_standalone(environ: Mapping[str, str]) -> bool:
    """Whether torchrun makes up a run of this host alone, rather than join one that has a name."""
    return bool(_STANDALONE.fullmatch(environ.get(MARK, "")))
