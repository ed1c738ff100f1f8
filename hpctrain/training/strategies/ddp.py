"""Distributed data parallelism: one process a device, gradients averaged while the backward pass runs."""

from __future__ import annotations

from typing import Any

from hpctrain.runtime.process_group import Team
from hpctrain.training.module import Module
from hpctrain.training.strategies.replicas import Replicas


class DDP(Replicas):
    """Each rank takes its loss over its own share of the global batch."""

    def __init__(self, module: Module, team: Team) -> None:
        """Broadcast rank 0's parameters and buffers. All ranks must call this."""
        super().__init__(module, team, own_share)


def own_share(output: Any, num_samples: int) -> tuple[Any, float]:
    """A rank's output as it is."""
    return output, num_samples
