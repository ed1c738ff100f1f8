"""Define the interface of the strategies, and train on a single rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.cluster import Ranks
from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.algorithms.algorithm import Algorithm, assign_flat
from hpctrain.training.base.tensors import group_by_type, is_sharded, local_part
from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.module import Module
from hpctrain.training.optim.optimizer_setup import OptimizerSetup, only_trainable
from hpctrain.training.trainer_config import TrainerConfig

#: Methods that can combine gradients; a strategy for several ranks must override at least one method.
_SHARING = frozenset({"place", "training_step", "backward", "before_update", "__init__"})


class Strategy:
    """Base class of the strategies; by default, a single rank trains. All methods are collective.

    A strategy moves the module to this rank's device. Before an update, it provides the gradient of every
    parameter: the mean over the ranks that share the data.

    Attributes:
        module: module to train; its parameters may be replaced by shards.
        context: the ranks.
        in_lockstep: True if every forward pass has collectives, even without a backward pass.
        supports_toggling: True if a step may update only some parameters.
        has_algorithms: True if replicas may use another algorithm than an all-reduce.
        has_buckets: True if gradients are sent in buckets of configurable size.
        algorithm: communication algorithm of the replicas.
        spawns: True if the process that calls `fit` starts the ranks in the absence of a launcher.
        optimizer_idx: index of the step's optimizer as a 1-tuple; empty if optimizers do not alternate.
        single_process: True if only one process computes.
        uses_all_devices: True if a process computes on all of its devices.
        splits_batches: True if the strategy splits a rank's samples into micro-batches itself.
        gathers_samples: True if `training_step_end` receives the samples of several ranks.
        has_complete_state: True if every rank updates all parameters.
        has_equal_replicas: True if parameters and optimizer states are equal on all ranks after each step.
        counts_tokens: True if a loss can be a mean over `num_tokens`.
        sums_exactly: True if the gradients can be summed independently of the number of ranks.
        remarks: remarks for the user at the start, as sentences.
    """

    in_lockstep: ClassVar[bool] = False
    supports_toggling: ClassVar[bool] = True
    has_algorithms: ClassVar[bool] = False
    has_buckets: ClassVar[bool] = False
    spawns: ClassVar[bool] = False
    single_process: ClassVar[bool] = False
    uses_all_devices: ClassVar[bool] = False
    splits_batches: ClassVar[bool] = False
    gathers_samples: ClassVar[bool] = False
    has_complete_state: ClassVar[bool] = True
    sums_exactly: ClassVar[bool] = False
    remarks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, module: Module, context: DistributedContext, settings: TrainerConfig) -> None:
        """Move `module` to this rank's device."""
        kinds = type(self).__mro__[:-2]
        if context.is_distributed and not any(vars(kind).keys() & _SHARING for kind in kinds):
            raise UserError(
                f"Strategy {settings.strategy!r} ({type(self).__name__}) overrides none of "
                f"{', '.join(sorted(_SHARING))}, so each of the {context.ranks.world_size} ranks would "
                "train alone. Override a method that synchronizes gradients, or subclass a built-in "
                "strategy."
            )
        self.module, self.context, self.settings = module, context, settings
        self.algorithm: Algorithm | None = None
        self.optimizer_idx: tuple[int, ...] = ()
        self._optimizer_parameters: Sequence[Sequence[torch.Tensor]] = ()
        self.place()

    @classmethod
    def check(cls, settings: TrainerConfig) -> None:
        """Raise a `UserError` if the settings are not compatible with this strategy."""

    def torch_is_too_old(self) -> UserError:
        """Return the error of a strategy that some versions of torch do not support."""
        return UserError(
            f"strategy={self.settings.strategy!r} needs torch 2.8 or newer, but torch {torch.__version__} is "
            "installed. Install a newer torch, or use strategy='zero1'."
        )

    @classmethod
    def data_rank(cls, ranks: Ranks) -> DataRank:
        """Return this rank's part of the samples, and the number of parts."""
        return DataRank(ranks.rank, ranks.world_size)

    @property
    def has_equal_replicas(self) -> bool:
        return False

    @property
    def counts_tokens(self) -> bool:
        return True

    def place(self) -> None:
        """Move the module to this rank's device."""
        self.module.to(self.context.device)

    def gradient_parts(self) -> list[int]:
        """Return the sizes of the gradient buckets in bytes; empty if unknown."""
        return []

    def summed_parameters(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """Return each trainable parameter, and the one with its gradient: the same, unless it is sharded."""
        return {name: (p, p) for name, p in self.module.named_parameters() if p.requires_grad}

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        """Run the module's training step, with gradient synchronization.

        Args:
            batch: this rank's samples, or spare ones if it has none.
            batch_idx: number of the global batch in its epoch, from 0.
            num_samples: this rank's samples.

        Returns:
            The result of `training_step_end`, and the number of samples that it represents.
        """
        output = self.module.training_step(batch, batch_idx, *self.optimizer_idx)
        return self.module.training_step_end(output), num_samples

    def setup_optimizer_toggling(self, parameters: Sequence[Sequence[torch.Tensor]]) -> None:
        """Prepare for steps with one optimizer each; `parameters` are those before `wrap_optimizers`."""
        if self.context.is_distributed and not self.supports_toggling:
            raise UserError(
                f"training_step accepts optimizer_idx, but strategy {self.settings.strategy!r} updates "
                "all parameters together. Use 'ddp' or 'zero1', or return one loss for all optimizers."
            )
        self._optimizer_parameters = parameters

    @contextmanager
    def toggled_optimizer(self, idx: int) -> Iterator[None]:
        """Run steps for one optimizer in this block: only its parameters receive a gradient."""
        self.optimizer_idx = (idx,)
        try:
            with only_trainable(self.module, self._optimizer_parameters[idx]):
                yield
        finally:
            self.optimizer_idx = ()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, the weighted loss from `training_step`."""
        torch.autograd.backward(loss)

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context for all forward and backward passes except the last pass before an update."""
        return nullcontext()

    def evaluation_step(self, method: str, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        """Call a method such as `validation_step` without gradients; return its result, and its samples."""
        output = getattr(self.module, method)(batch, batch_idx)
        return self.end_evaluation_step(method, output), num_samples

    def end_evaluation_step(self, method: str, output: Any) -> Any:
        """Return the result of the module's method with the suffix `_end`; unchanged if there is none."""
        end = getattr(self.module, f"{method}_end", None)
        return output if end is None else end(output)

    def wrap_optimizers(self, optimization: OptimizerSetup) -> OptimizerSetup:
        """Return the optimizers and schedules for training, based on those of the module."""
        return optimization

    def before_update(self) -> None:
        """Complete the gradients before use; called at least once per update."""

    def gradient_norm(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the norm of all gradients together, equal on all ranks."""
        if self.context.is_distributed and not self.has_complete_state:
            return joint_norm(parameters, _has_sharded_gradient, self.context.device)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).to(self.context.device)

    def on_optimizer_step_end(self, step: int) -> None:
        """Handle the end of all optimizers' update of `step`, counted from 1."""

    def sync_buffers(self) -> None:
        """Make the module's buffers equal on all ranks, before a validation or a checkpoint."""
        if self.context.is_distributed:
            broadcast_tensors(self.module.buffers())

    def finish(self) -> str | None:
        """Restore the complete module at the end of training; return a message if this is impossible."""
        return None


def _has_sharded_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and is_sharded(parameter.grad)


def joint_norm(
    parameters: Iterable[torch.Tensor], is_split: Callable[[torch.Tensor], bool], device: torch.device
) -> torch.Tensor:
    """Return the norm of the gradients of all ranks; those that are not split are equal on all ranks."""
    gradients: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for parameter in parameters:
        if parameter.grad is not None:
            gradients[is_split(parameter)].append(local_part(parameter.grad))
    rank_norm, shared_norm = (
        torch.nn.utils.get_total_norm(gradients[kind]).to(device, torch.float32) for kind in (True, False)
    )
    squares = rank_norm**2.0
    dist.all_reduce(squares)
    return torch.pow(squares + shared_norm**2.0, 0.5)


def broadcast_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Broadcast rank 0's values of `tensors`, one message per dtype and device."""
    with torch.no_grad():
        for group in group_by_type(tensors):
            message = torch.cat([tensor.reshape(-1) for tensor in group])
            dist.broadcast(message, src=0)
            assign_flat(message, group)
