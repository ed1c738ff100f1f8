"""Replicas that train by themselves and take the mean of their weights now and then, or in the background."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.runtime.process_group import Team
from hpctrain.training.algorithms.base import Algorithm, hook, leave_gradients


class LocalSGD(Algorithm):
    """Weights are averaged after every so many steps, and nothing is sent in between.

    Stich, "Local SGD Converges Fast and Communicates Little", 2019; that gradients are averaged at first is
    of Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2020.
    """

    shares_gradients = False

    def __init__(self, every: int = 4) -> None:
        """Average after each `every` steps."""
        super().__init__()
        self.every = every

    def attach(self, parallel: DistributedDataParallel) -> None:
        hook(parallel, leave_gradients)

    def updated(self, step: int) -> None:
        if step % self.every == 0:
            self.average(self.weights.parameters)


class Async(Algorithm):
    """Weights are averaged all the time, in the background, while each replica trains on.

    A rank takes the mean of all weights as they were when the averaging began, and adds what it has learned
    since. No step waits; how old a mean is depends on the network. Two runs are so never the same. After
    Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021.
    """

    shares_gradients = False

    def begin(self, module: nn.Module, team: Team) -> None:
        super().begin(module, team)
        # Its own, for ranks begin averaging at different steps, between other collectives.
        self._group = dist.new_group()
        self._num_begun = 0
        self._before: torch.Tensor
        self._sum: torch.Tensor
        self._pending: Any = None

    def attach(self, parallel: DistributedDataParallel) -> None:
        hook(parallel, leave_gradients)

    def updated(self, step: int) -> None:  # noqa: ARG002
        if self._pending is None:
            self._begin()
        elif self._pending.is_completed():
            self._take()
            self._begin()

    def align(self) -> None:
        # Whoever is behind begins what the others have begun.
        for _ in range(max(self.team.gather(self._num_begun)) - self._num_begun):
            if self._pending is not None:
                self._take()
            self._begin()
        if self._pending is not None:
            self._take()
        super().align()

    def _begin(self) -> None:
        self._before = self.weights.flat()
        self._sum = self._before.clone()
        self.sent_bytes += self._sum.nbytes
        self._pending = dist.all_reduce(self._sum, group=self._group, async_op=True)
        self._num_begun += 1

    def _take(self) -> None:
        self._pending.wait()
        self._pending = None
        mean = self._sum / self.team.ranks.world_size
        self.weights.load(mean + (self.weights.flat() - self._before))
