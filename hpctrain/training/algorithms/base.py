"""What a strategy of replicas asks of the way in which they agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpctrain.errors import UserError
from hpctrain.runtime.process_group import Team
from hpctrain.training.algorithms.weights import Weights
from hpctrain.training.optimization import Optimization

if TYPE_CHECKING:
    from hpctrain.training.settings import Settings


#: A torch.distributed.GradBucket, of which torch tells no type.
Bucket = Any


class Algorithm:
    """An all-reduce of gradients, as DDP does it by itself; what others do differently, they override.

    An algorithm may let the replicas differ between two steps. Where all ranks meet, for a validation or a
    checkpoint, they are made equal, so that a checkpoint fits any number of ranks.

    Attributes:
        sent_bytes: what this rank has handed over to be sent, since the beginning.
        shares_gradients: whether every step ends with equal gradients; else weights differ in between.
    """

    shares_gradients: ClassVar[bool] = True

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.team: Team
        self.weights: Weights
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._kept: dict[str, Any] = {}

    @classmethod
    def check(cls, settings: Settings) -> None:
        """Look whether the settings go with this algorithm.

        Raises:
            UserError: they do not; the message says why.
        """
        if settings.precision == "16-mixed" and not cls.shares_gradients:
            raise UserError(
                f"precision '16-mixed' does not go with algorithm {settings.algorithm!r}: ranks whose "
                "gradients differ skip different steps. Take 'bf16-mixed'."
            )

    def begin(self, module: nn.Module, team: Team) -> None:
        """Get to know the replicas, which are equal. Called where there are several ranks."""
        self.team = team
        self.weights = Weights(module)

    def attach(self, parallel: DistributedDataParallel) -> None:
        """Take the place of DDP's all-reduce of gradients, or leave it as it is."""

    def optimized(self, optimization: Optimization) -> None:
        """Get to know the optimizers, before the first step.

        Raises:
            UserError: they do not go with this algorithm.
        """
        self.optimizers = optimization.optimizers

    def updated(self, step: int) -> None:
        """The optimizers have made their update of `step`, counted from 1."""

    def align(self) -> None:
        """Make weights, and what optimizers keep, equal on all ranks. All ranks must call this."""
        if not self.shares_gradients:
            self.average(self.weights.parameters)
            self.average(self.weights.kept_by(self.optimizers))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to keep, after `align`: the same on all ranks."""
        return self._kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, on any number of ranks."""
        self._kept = state

    def average(self, tensors: list[torch.Tensor]) -> None:
        """Replace tensors by their means over all ranks. All ranks must call this."""
        for together in self.weights.by_type(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in together])
            self.all_reduce(flat)
            flat /= self.team.ranks.world_size
            self.weights.put(flat, together)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up over all ranks, in place, and count what is sent."""
        self.sent_bytes += tensor.nbytes
        dist.all_reduce(tensor)


class AllReduce(Algorithm):
    """The mean of all gradients, while the backward pass runs: DDP as it is."""


def hook(parallel: DistributedDataParallel, exchange: Callable[[Bucket], Future[torch.Tensor]]) -> None:
    """Have `exchange` take the place of DDP's all-reduce of each bucket of gradients."""
    # torch looks at annotations, for a type that it does not show to those that check types.
    parallel.register_comm_hook(None, lambda _state, bucket: exchange(bucket))


def ready(tensor: torch.Tensor) -> Future[torch.Tensor]:
    """A result that need not be waited for."""
    future: Future[torch.Tensor] = Future()
    future.set_result(tensor)
    return future


def leave_gradients(bucket: Bucket) -> Future[torch.Tensor]:
    """A communication hook that sends nothing: each rank keeps its own gradients."""
    return ready(bucket.buffer())
