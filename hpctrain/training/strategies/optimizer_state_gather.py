"""Exchange of optimizer state between ranks that update different parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpctrain.runtime.distributed_context import DistributedContext


class OptimizerStateGather:
    """Gather the optimizer state of all ranks for a checkpoint, and remove it afterwards.

    Attributes:
        optimizers: this rank's optimizers, constructed identically on all ranks.
    """

    def __init__(self, owned: Sequence[Sequence[nn.Parameter]], context: DistributedContext) -> None:
        """Set up the gather without communication.

        Args:
            owned: for each rank, the parameters updated only by this rank.
            context: the ranks.
        """
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._owned, self._context = owned, context
        # A loaded checkpoint contains the state of all ranks.
        self._has_others = True

    def gather(self) -> None:
        """Gather the state of all ranks' optimizers. All ranks must call this.

        State from other ranks is on the CPU.
        """
        for rank, owned in enumerate(self._owned):
            kept: list[Any] = [[optimizer.state.get(p) for p in owned] for optimizer in self.optimizers]
            states_of_rank = self._context.broadcast(kept, rank, "the state of an optimizer")
            if rank != self._context.ranks.rank:
                for optimizer, states in zip(self.optimizers, states_of_rank, strict=True):
                    _keep(optimizer, owned, states)
        for optimizer in self.optimizers:
            _put_in_order(optimizer)
        self._has_others = True

    def drop_others(self) -> None:
        """Drop the state of other ranks, to keep the memory savings of the stages."""
        if not self._has_others:
            return
        self._has_others = False
        for rank, owned in enumerate(self._owned):
            if rank != self._context.ranks.rank:
                for optimizer in self.optimizers:
                    _keep(optimizer, owned, [None] * len(owned))


def _keep(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], states: list[Any]) -> None:
    """Set an optimizer's state for these parameters; None removes it."""
    for parameter, state in zip(parameters, states, strict=True):
        if state is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = state


def _put_in_order(optimizer: torch.optim.Optimizer) -> None:
    """Sort the state in the order of the parameters, to make it equal on all ranks."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(parameter)
