"""DDP2: one process a device, but the batch is the node's; gradients are averaged across nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.runtime.process_group import Team
from hpctrain.training.module import Module
from hpctrain.training.strategies.node import Node
from hpctrain.training.strategies.replicas import Replicas

if TYPE_CHECKING:
    from hpctrain.training.settings import Settings


class DDP2(Replicas):
    """`training_step_end` gets the outputs of all ranks of the node, as one batch.

    Each of the node's k ranks takes the same loss over it. The backward pass of the gather adds up k times
    the gradient for every encoder, and each rank has the gradient of what comes after the gather once; the
    mean over all ranks, with the loss weighted by 1/k of the node's samples, is for both the mean over the
    nodes' batches.
    """

    def __init__(self, module: Module, team: Team, settings: Settings) -> None:
        """Find who is on this node, and broadcast rank 0's parameters. All ranks must call this."""
        self._node = Node(team) if team.is_distributed else None
        self._gathers = type(module).training_step_end is not Module.training_step_end
        super().__init__(module, team, settings)

    def join(self, output: Any, num_samples: int) -> tuple[Any, float]:
        # A module without an end of its step takes its loss sample by sample: there is nothing to join.
        if self._node is None or not self._gathers:
            return output, num_samples
        return self._node.gather(output, num_samples)
