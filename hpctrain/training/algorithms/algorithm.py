"""Define the interface of the communication algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.base.tensors import group_by_type
from hpctrain.training.optim.optimizer_setup import OptimizerSetup, parameters_of
from hpctrain.training.trainer_config import TrainerConfig

#: A torch.distributed.GradBucket, which torch does not export as a type.
GradBucket = Any


class Algorithm:
    """Base class of the algorithms; the default is DDP's all-reduce of gradients. All methods are collective.

    An algorithm may let the replicas differ between two steps. Before a validation or a checkpoint,
    `synchronize` makes the replicas equal. Checkpoints thus fit any number of ranks.

    Attributes:
        parameters: trainable parameters of the module.
        sent_bytes: bytes that this rank has sent since the start.
        shares_gradients: True if every step ends with equal gradients; if not, weights may differ.
        keeps_gradients: True if a gradient affects later steps even if its own update is skipped.
    """

    shares_gradients: ClassVar[bool] = True
    keeps_gradients: ClassVar[bool] = False

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.context: DistributedContext
        self.parameters: list[torch.Tensor] = []
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._state: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"

    @classmethod
    def check(cls, settings: TrainerConfig) -> None:
        """Raise a `UserError` if the settings are not compatible with this algorithm."""
        if settings.on_bad_loss == "skip" and cls.keeps_gradients:
            raise UserError(
                f"on_bad_loss='skip' does not work with algorithm={settings.algorithm!r}, which keeps "
                "parts of each gradient for later steps. Use on_bad_loss='rollback'."
            )
        if settings.precision == "16-mixed" and not cls.shares_gradients:
            raise UserError(
                f"precision='16-mixed' does not work with algorithm={settings.algorithm!r}: the gradients "
                "of the ranks differ, so the ranks would skip different steps. Use "
                "precision='bf16-mixed'."
            )

    def begin(self, module: nn.Module, context: DistributedContext) -> None:
        """Receive the identical replicas. Called only if there are several ranks."""
        self.context = context
        self.parameters = [p for p in module.parameters() if p.requires_grad]

    def attach(self, parallel: DistributedDataParallel) -> None:
        """Replace DDP's all-reduce of gradients; the default keeps it."""

    def setup_optimizers(self, optimization: OptimizerSetup) -> None:
        """Receive the optimizers, before the first step."""
        self.optimizers = optimization.optimizers

    def on_optimizer_step_end(self, step: int) -> None:
        """Handle the end of the optimizers' update of `step`, counted from 1."""

    def synchronize(self) -> None:
        """Make weights and optimizer state equal on all ranks."""
        if not self.shares_gradients:
            self.average(self.parameters)
            self.average(self._optimizer_tensors())

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, after `synchronize`; identical on all ranks."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, on any number of ranks."""
        self._state = state

    def average(self, tensors: list[torch.Tensor]) -> None:
        """Replace tensors with their means over all ranks."""
        for group in group_by_type(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            self.all_reduce(flat)
            flat /= self.context.ranks.world_size
            assign_flat(flat, group)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks, in place, and count the bytes sent."""
        self.sent_bytes += tensor.nbytes
        dist.all_reduce(tensor)

    def flat_weights(self) -> torch.Tensor:
        """Return a copy of all trainable parameters as one float32 vector."""
        return torch.cat([p.detach().reshape(-1).float() for p in self.parameters])

    def load_weights(self, flat: torch.Tensor) -> None:
        """Replace the trainable parameters."""
        assign_flat(flat, self.parameters)

    def _optimizer_tensors(self) -> list[torch.Tensor]:
        """Return the optimizers' state tensors, such as momenta, but not counters, which never differ."""
        return [
            value
            for optimizer in self.optimizers
            for parameter in parameters_of(optimizer)
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim
        ]


class AllReduce(Algorithm):
    """Plain DDP: average all gradients during the backward pass."""


class BucketAlgorithm(Algorithm):
    """Base class of algorithms that replace DDP's all-reduce of each gradient bucket with `exchange`."""

    def attach(self, parallel: DistributedDataParallel) -> None:
        # A lambda without annotations: torch checks annotations against a type that is not public.
        parallel.register_comm_hook(None, lambda _state, bucket: self.exchange(bucket))

    def exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        return completed_future(bucket.buffer())


def completed_future(tensor: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(tensor)
    return future


def assign_flat(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    with torch.no_grad():
        for tensor, values in zip(tensors, pieces, strict=True):
            tensor.copy_(values.view_as(tensor))
