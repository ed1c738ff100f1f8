"""A process on its own: a laptop, a notebook, a login node, a batch script."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.cluster.ranks import Ranks


def detect(environ: Mapping[str, str]) -> Ranks | None:  # noqa: ARG001 (as every environment)
    """Rank 0 of 1."""
    return Ranks(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        master_addr="127.0.0.1",
        master_port=0,
        environment="local",
        sources={"rank": "no job step and no RANK in the environment"},
    )
