"""What optimizers keep beside parameters, where each parameter is updated by one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from hpctrain.runtime.process_group import Team


class Kept:
    """Gives every rank, for a checkpoint, what the others' optimizers keep, and takes it away again.

    Attributes:
        optimizers: this rank's, made alike on all of them.
    """

    def __init__(self, owned: Sequence[Sequence[nn.Parameter]], team: Team) -> None:
        """Nothing is exchanged yet.

        Args:
            owned: for each rank the parameters that it alone updates.
            team: the ranks.
        """
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._owned, self._team = owned, team
        # What is loaded is that of all ranks, too.
        self._has_others = True

    def gather(self) -> None:
        """Bring together what all ranks' optimizers keep. All ranks must call this.

        What is another's lies on the CPU.
        """
        for rank, owned in enumerate(self._owned):
            kept: list[Any] = [[optimizer.state.get(p) for p in owned] for optimizer in self.optimizers]
            box = [pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, kept)]
            dist.broadcast_object_list(box, src=rank, group=self._team.control)
            if rank != self._team.ranks.rank:
                for optimizer, states in zip(self.optimizers, box[0], strict=True):
                    _keep(optimizer, owned, states)
        for optimizer in self.optimizers:
            _put_in_order(optimizer)
        self._has_others = True

    def drop_others(self) -> None:
        """Forget what is another rank's: it takes the memory that stages are to save."""
        if not self._has_others:
            return
        self._has_others = False
        for rank, owned in enumerate(self._owned):
            if rank != self._team.ranks.rank:
                for optimizer in self.optimizers:
                    _keep(optimizer, owned, [None] * len(owned))


def _keep(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], states: list[Any]) -> None:
    """Set what an optimizer keeps for these parameters; None for nothing."""
    for parameter, state in zip(parameters, states, strict=True):
        if state is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = state


def _put_in_order(optimizer: torch.optim.Optimizer) -> None:
    """Have every rank's optimizer keep things in one order, whichever it had first."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(parameter)
