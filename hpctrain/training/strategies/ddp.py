"""Replicas of the module on all ranks, with gradients averaged during the backward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.torch_compat import buffer_broadcast_kwargs, register_first_post_hook
from hpctrain.training.algorithms import Algorithm, find_algorithm
from hpctrain.training.module import Module, check_frozen, is_manual, takes_optimizer_idx
from hpctrain.training.optim.optimizer_setup import OptimizerSetup, only_trainable
from hpctrain.training.strategies.base import Strategy, broadcast_buffers, broadcast_tensors
from hpctrain.training.strategies.sharded_params import ShardedParameters, gradient_norm

if TYPE_CHECKING:
    from hpctrain.training.trainer_config import TrainerConfig


class DataParallelBase(Strategy):
    """One replica of the module per rank, in torch's DistributedDataParallel."""

    has_buckets = True
    sums_exactly = True

    def __init__(self, module: Module, context: DistributedContext, settings: TrainerConfig) -> None:
        """Broadcast rank 0's parameters and buffers."""
        super().__init__(module, context, settings)
        self.algorithm: Algorithm = find_algorithm(settings.algorithm)
        # A single rank needs no wrapper.
        self._forward: nn.Module | None = None
        self._forwards: list[nn.Module] = []
        if context.is_distributed and (is_manual(module) or settings.elastic_determinism):
            broadcast_tensors([*module.parameters(), *module.buffers()])
        elif context.is_distributed and not takes_optimizer_idx(module):
            self._forward = self._averaging()

    @property
    def has_equal_replicas(self) -> bool:
        return self.context.is_distributed and self.algorithm.shares_gradients

    def gradient_parts(self) -> list[int]:
        if not self.context.is_distributed or self.settings.elastic_determinism:
            return []
        limit = (self.settings.bucket_cap_mb or 25) * 2**20
        parts: list[int] = []
        part = 0
        for parameter in reversed(list(self.module.parameters())):
            part += parameter.nbytes if parameter.requires_grad else 0
            if part >= (2**20 if self.settings.bucket_cap_mb is None and not parts else limit):
                parts, part = [*parts, part], 0
        return [*parts, part] if part else parts

    def join(self, output: Any, num_samples: int) -> tuple[Any, float]:
        """Return the output and the number of samples for the loss."""
        return output, num_samples

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        if self._forward is None:
            return self._run_module(batch, batch_idx, num_samples, self.optimizer_idx)
        step = self._forward.module if isinstance(self._forward, DistributedDataParallel) else self._forward
        assert isinstance(step, _Step)
        check_frozen(step.frozen, "its gradient would not be averaged over the ranks")
        try:
            output, counted = self._forward(batch, batch_idx, num_samples, self.optimizer_idx)
        except RuntimeError as error:
            _explain(error, self.module)
            raise
        return output, counted

    def _run_module(
        self, batch: Any, batch_idx: int, num_samples: int, turn: tuple[int, ...]
    ) -> tuple[Any, float]:
        module = self.module
        output, counted = self.join(module.training_step(batch, batch_idx, *turn), num_samples)
        return module.training_step_end(output), counted

    def accumulating(self) -> AbstractContextManager[None]:
        if isinstance(self._forward, DistributedDataParallel):
            return self._forward.no_sync()
        return nullcontext()

    def wrap_optimizers(self, optimization: OptimizerSetup) -> OptimizerSetup:
        if self.context.is_distributed:
            # The replicas are equal only from this point.
            self.algorithm.begin(self.module, self.context)
            for forward in (*self._forwards, self._forward):
                if isinstance(forward, DistributedDataParallel):
                    self.algorithm.attach(forward)
            self.algorithm.setup_optimizers(optimization)
        return optimization

    def on_optimizer_step_end(self, step: int) -> None:
        if self.context.is_distributed:
            self.algorithm.on_optimizer_step_end(step)

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers, such as running means."""
        if self.context.is_distributed:
            self.algorithm.synchronize()
            broadcast_buffers(self.module)

    def setup_optimizer_toggling(self, parameters: Sequence[Sequence[torch.Tensor]]) -> None:
        super().setup_optimizer_toggling(parameters)
        for own in parameters if self.context.is_distributed else ():
            with only_trainable(self.module, own):
                self._forwards.append(self._averaging())

    @contextmanager
    def toggled_optimizer(self, idx: int) -> Iterator[None]:
        with super().toggled_optimizer(idx):
            if self._forwards:
                self._forward = self._forwards[idx]
            yield

    def _averaging(self) -> nn.Module:
        step = _Step(self.module, self._run_module)
        if not any(p.requires_grad for p in self.module.parameters()):
            return step
        forward = DistributedDataParallel(
            step,
            device_ids=[self.context.device] if self.context.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.settings.bucket_cap_mb,
            static_graph=self.settings.static_graph,
            find_unused_parameters=self.settings.find_unused_parameters,
            # Replicas that may differ broadcast buffers in `sync_buffers` instead.
            **buffer_broadcast_kwargs(self.algorithm.shares_gradients),
        )
        touched: torch.Tensor = forward(None, 0, 0, touch_only=True)
        torch.autograd.backward(touched)
        forward.zero_grad(set_to_none=True)
        return forward


class DDP(DataParallelBase):
    """Strategy in which each rank computes its loss over its own share of the global batch."""

    has_algorithms = True


class DDPSpawn(DDP):
    """Variant of ddp in which the calling process starts the ranks, unless a launcher has started them."""

    spawns = True


class _Step(nn.Module):
    """Module for DDP to wrap, whose forward pass runs a training step."""

    def __init__(self, module: Module, take: Callable[..., tuple[Any, float]]) -> None:
        super().__init__()
        self.module = module
        self._take = take
        self.frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]

    def forward(
        self,
        batch: Any,
        batch_idx: int,
        num_samples: int,
        turn: tuple[int, ...] = (),
        touch_only: bool = False,
    ) -> Any:
        if touch_only:
            return _sum_of_nothing([p for p in self.module.parameters() if p.requires_grad])
        return self._take(batch, batch_idx, num_samples, turn)


def regroup_buckets(model: object) -> None:
    """Regroup the gradient buckets of a model before its first step."""
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters or model.static_graph:
        return
    module = model.module
    # Such as that of Accelerate, with autocast, or of a compiled module.
    own = vars(module).get("forward")
    module.forward = lambda: _sum_of_nothing([p for p in module.parameters() if p.requires_grad])
    try:
        torch.autograd.backward(model())
    finally:
        del module.forward
        if own is not None:
            module.forward = own
    model.zero_grad(set_to_none=True)


def _sum_of_nothing(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Return a zero that depends on every parameter; its backward pass starts with the last parameter."""
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        total = total + (parameter * 0).sum().to(total.device, total.dtype)
    return total


def _explain(error: RuntimeError, module: nn.Module) -> None:
    """Name the parameters that the previous step did not use, if these caused torch's error."""
    if "find_unused_parameters=True" not in str(error):
        return
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    names = [trained[int(number)] for number in numbers[1].split()] if numbers else ["some parameters"]
    raise UserError(
        f"{type(module).__name__}.training_step did not use {', '.join(names)}, so the ranks would wait "
        "forever for the gradients of these parameters. Remove or freeze the parameters "
        "(requires_grad_(False)). If different steps use different parameters, set "
        "find_unused_parameters=True."
    ) from error


class ZeRO1(DataParallelBase):
    """ZeRO stage 1 (see `fully_sharded`): ddp with optimizer state sharded over the ranks."""

    has_complete_state = False

    def wrap_optimizers(self, optimization: OptimizerSetup) -> OptimizerSetup:
        self._parts: ShardedParameters | None = None
        if self.context.is_distributed:
            ranks, device = self.context.ranks, self.context.device
            mesh = init_device_mesh(device.type, (ranks.world_size,))
            parts = self._parts = ShardedParameters(mesh)
            for optimizer in optimization.optimizers:
                parts.shard_optimizer(optimizer, self.before_update)
                # The script's own hooks then use the complete parameters.
                register_first_post_hook(optimizer, lambda updated, *_: parts.gather(updated))
        return optimization

    def before_update(self) -> None:
        if self._parts is not None:
            self._parts.assign_gradients()

    def gradient_norm(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        if self._parts is None:
            return super().gradient_norm(parameters)
        return gradient_norm(parameters, self.context.device)
