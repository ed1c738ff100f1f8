"""Detect ranks in torch's own variables, set by torchrun and compatible launchers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.cluster.env_variables import first_set, is_local_address, read_int, read_port
from hpctrain.cluster.ranks import Ranks
from hpctrain.errors import EnvironmentMismatch

# Run id of `torchrun --standalone`. MASTER_ADDR, the full name of the host, does not identify this mode.
_STANDALONE = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: Only torchrun sets this variable. The others may be set by a container, a shell or an outer job.
RUN_ID_VARIABLE = "TORCHELASTIC_RUN_ID"

#: Variables that a compatible launcher must set, in addition to NODE_RANK if there are several nodes.
REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def detect_torchrun(environ: Mapping[str, str]) -> Ranks | None:
    """Return the ranks that torchrun or a compatible launcher has set, or None."""
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        return None
    world_size = read_int(environ, "WORLD_SIZE")
    missing = [name for name in REQUIRED_VARIABLES if not environ.get(name)]
    if missing == ["LOCAL_WORLD_SIZE"] and is_local_address(environ["MASTER_ADDR"]):
        missing = []
    if missing and world_size == 1:
        return None
    size_variable = first_set(environ, "LOCAL_WORLD_SIZE")
    local_world_size = read_int(environ, size_variable or "WORLD_SIZE")
    node_variable = first_set(environ, "GROUP_RANK", "NODE_RANK")
    if local_world_size != world_size and node_variable is None:
        missing.append("NODE_RANK")
    if missing:
        raise EnvironmentMismatch(
            f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} are set, but not "
            f"{', '.join(missing)}. Start the script with torchrun. To run a single process, unset RANK and "
            "WORLD_SIZE."
        )
    nodes_variable = first_set(environ, "GROUP_WORLD_SIZE")
    num_nodes = -(-world_size // max(1, local_world_size))
    return Ranks(
        rank=read_int(environ, "RANK"),
        world_size=world_size,
        local_rank=read_int(environ, "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=read_int(environ, node_variable) if node_variable else 0,
        num_nodes=read_int(environ, nodes_variable) if nodes_variable else num_nodes,
        master_addr=environ["MASTER_ADDR"],
        master_port=read_port(environ, "MASTER_PORT"),
        environment="torchrun",
        rendezvous_id=f"torchrun/{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
        sources={
            "rank": "RANK",
            "world_size": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "local_world_size": size_variable or "WORLD_SIZE, all on this host (MASTER_ADDR)",
            "node_rank": node_variable or "LOCAL_WORLD_SIZE = WORLD_SIZE",
            "num_nodes": nodes_variable or "WORLD_SIZE / LOCAL_WORLD_SIZE",
            "master_addr": "MASTER_ADDR",
            "master_port": "MASTER_PORT",
        },
    )


def is_standalone(environ: Mapping[str, str]) -> bool:
    """True if the run is `torchrun --standalone`, on this host only."""
    return bool(_STANDALONE.fullmatch(environ.get(RUN_ID_VARIABLE, "")))
