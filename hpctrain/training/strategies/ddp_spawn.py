"""Variant of ddp in which the calling process starts the ranks."""

from __future__ import annotations

from hpctrain.training.strategies.ddp_base import DataParallelBase


class DDPSpawn(DataParallelBase):
    """Strategy that starts the ranks; identical to ddp if a launcher, such as Slurm, has started them."""

    has_algorithms = True
    spawns = True
