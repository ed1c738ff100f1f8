"""Train replicas of the module on all ranks, and average gradients during the backward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.torch_compat import buffer_broadcast_kwargs
from hpctrain.training.algorithms import Algorithm, find_algorithm
from hpctrain.training.module import Module, check_frozen, is_manual, takes_optimizer_idx
from hpctrain.training.optim.optimizer_setup import OptimizerSetup, only_trainable
from hpctrain.training.strategies.strategy import Strategy, broadcast_tensors
from hpctrain.training.trainer_config import TrainerConfig


class DataParallelBase(Strategy):
    """One replica of the module per rank, in torch's DistributedDataParallel.

    After the first backward pass of a process, DDP regroups its gradient buckets. With more than two ranks,
    this changes the order of additions, and the results of a resumed process in the last bit. Therefore,
    every process regroups before its first real step.
    """

    has_buckets = True
    sums_exactly = True

    def __init__(self, module: Module, context: DistributedContext, settings: TrainerConfig) -> None:
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
        sizes: list[int] = []
        size = 0
        for parameter in reversed(list(self.module.parameters())):
            size += parameter.nbytes if parameter.requires_grad else 0
            if size >= (2**20 if self.settings.bucket_cap_mb is None and not sizes else limit):
                sizes, size = [*sizes, size], 0
        return [*sizes, size] if size else sizes

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        if self._forward is None:
            return self._run_module(batch, batch_idx, num_samples, self.optimizer_idx)
        try:
            output: tuple[Any, float] = self._forward(batch, batch_idx, num_samples, self.optimizer_idx)
        except RuntimeError as error:
            _explain(error, self.module)
            raise
        return output

    def _run_module(
        self, batch: Any, batch_idx: int, num_samples: int, turn: tuple[int, ...]
    ) -> tuple[Any, float]:
        output = self.module.training_step(batch, batch_idx, *turn)
        return self.module.training_step_end(output), num_samples

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
        # Forward passes also do this, before each rank updates the buffers from its own samples.
        if self.context.is_distributed:
            self.algorithm.synchronize()
            broadcast_tensors(self.module.buffers())

    def setup_optimizer_toggling(self, parameters: Sequence[Sequence[torch.Tensor]]) -> None:
        super().setup_optimizer_toggling(parameters)
        for group in parameters if self.context.is_distributed else ():
            with only_trainable(self.module, group):
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
        _use_all_parameters(forward)
        return forward


class DDP(DataParallelBase):
    """Strategy in which each rank computes its loss over its own share of the global batch."""

    has_algorithms = True


class DDPSpawn(DDP):
    """Variant of ddp in which the calling process starts the ranks, unless a launcher has started them."""

    spawns = True


class _Step(nn.Module):
    def __init__(self, module: Module, run: Callable[..., tuple[Any, float]]) -> None:
        super().__init__()
        self.module = module
        self._run = run
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]

    def forward(self, batch: Any, batch_idx: int, num_samples: int, turn: tuple[int, ...]) -> Any:
        check_frozen(self._frozen, "its gradient would not be averaged over the ranks")
        return self._run(batch, batch_idx, num_samples, turn)


def regroup_buckets(model: object) -> None:
    """Regroup the gradient buckets before the first step, unless torch never does; removes gradients."""
    if isinstance(model, DistributedDataParallel) and not (
        model.find_unused_parameters or model.static_graph
    ):
        _use_all_parameters(model)


def _use_all_parameters(model: DistributedDataParallel) -> None:
    """Run passes of a graph that includes each parameter once, but no data, buffers or random state."""
    module = model.module
    # Such as that of Accelerate, with autocast, or of a compiled module.
    forward = vars(module).get("forward")
    module.forward = lambda: _sum_of_nothing([p for p in module.parameters() if p.requires_grad])
    try:
        torch.autograd.backward(model())
    finally:
        del module.forward
        if forward is not None:
            module.forward = forward
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
