"""ddp whose ranks the calling process starts."""

from __future__ import annotations

from hpctrain.training.strategies.replicas import Replicas


class DDPSpawn(Replicas):
    """Where ranks were started already, such as by Slurm, there is nothing to start: it is ddp."""

    has_algorithms = True
    spawns = True
