"""Averaging of weights, periodically or in the background, between replicas that train independently."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.algorithms.base import Algorithm, noop_hook, register_comm_hook


class LocalSGD(Algorithm):
    """Averaging of weights every `every` steps, without communication in between.

    Stich, "Local SGD Converges Fast and Communicates Little", 2019; averaging gradients during warm-up
    follows Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2020.
    """

    shares_gradients = False

    def __init__(self, every: int = 4) -> None:
        """Average after every `every` steps."""
        super().__init__()
        self.every = every

    def attach(self, parallel: DistributedDataParallel) -> None:
        register_comm_hook(parallel, noop_hook)

    def on_optimizer_step_end(self, step: int) -> None:
        if step % self.every == 0:
            self.average(self.weights.parameters)


class AsyncAveraging(Algorithm):
    """Continuous averaging of weights in the background while each replica trains.

    A rank adds its progress since the start of the averaging to the mean of all weights. No step waits. The
    age of a mean depends on the network, so runs are not reproducible. Based on Gan et al., "BAGUA: Scaling
    up Distributed Learning with System Relaxations", 2021.
    """

    shares_gradients = False

    def begin(self, module: nn.Module, context: DistributedContext) -> None:
        super().begin(module, context)
        # A separate group: ranks start averaging at different steps, between other collectives.
        self._group = dist.new_group()
        self._num_started = 0
        self._weights_before: torch.Tensor
        self._sum: torch.Tensor
        self._pending: Any = None

    def attach(self, parallel: DistributedDataParallel) -> None:
        register_comm_hook(parallel, noop_hook)

    def on_optimizer_step_end(self, step: int) -> None:  # noqa: ARG002
        if self._pending is None:
            self._start_average()
        elif self._pending.is_completed():
            self._apply_average()
            self._start_average()

    def synchronize(self) -> None:
        # Slower ranks start the averaging operations that other ranks have already started.
        for _ in range(max(self.context.all_gather(self._num_started)) - self._num_started):
            if self._pending is not None:
                self._apply_average()
            self._start_average()
        if self._pending is not None:
            self._apply_average()
        super().synchronize()

    def _start_average(self) -> None:
        self._weights_before = self.weights.flat()
        self._sum = self._weights_before.clone()
        self.sent_bytes += self._sum.nbytes
        self._pending = dist.all_reduce(self._sum, group=self._group, async_op=True)
        self._num_started += 1

    def _apply_average(self) -> None:
        self._pending.wait()
        self._pending = None
        mean = self._sum / self.context.ranks.world_size
        self.weights.load(mean + (self.weights.flat() - self._weights_before))
