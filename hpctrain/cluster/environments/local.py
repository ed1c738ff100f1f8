"""Rank of a single process without a launcher: on a laptop or login node, in a notebook or batch script."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.cluster.mpi_launchers import LOOPBACK
from hpctrain.cluster.ranks import Ranks

_FIELDS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes", "master_addr")


def detect(environ: Mapping[str, str]) -> Ranks:
    """Return rank 0 of 1."""
    if environ.get("SLURM_JOB_ID"):
        why = f"single process: inside Slurm job {environ['SLURM_JOB_ID']}, but not started by srun"
    else:
        why = "single process: no launcher has set its environment variables"
    return Ranks(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        master_addr=LOOPBACK,
        master_port=0,
        environment="local",
        sources={**dict.fromkeys(_FIELDS, why), "master_port": "not needed by a single process"},
    )
