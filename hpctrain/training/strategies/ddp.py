"""Distributed data parallelism: one process per device, gradients averaged during the backward pass."""

from __future__ import annotations

from hpctrain.training.strategies.ddp_base import DataParallelBase


class DDP(DataParallelBase):
    """Strategy in which each rank computes its loss over its own share of the global batch."""

    has_algorithms = True


class DDPSpawn(DataParallelBase):
    """Strategy that starts the ranks; identical to ddp if a launcher, such as Slurm, has started them."""

    has_algorithms = True
    spawns = True
