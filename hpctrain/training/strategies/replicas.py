"""The module on every rank, with gradients that are averaged while the backward pass runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.errors import UserError
from hpctrain.runtime.process_group import Team
from hpctrain.training.algorithms import Algorithm, find_algorithm
from hpctrain.training.module import Module, takes_optimizer_idx
from hpctrain.training.newer_torch import sharing_buffers
from hpctrain.training.optimization import Optimization, toggled
from hpctrain.training.strategies.base import Strategy
from hpctrain.training.strategies.buffers import share_buffers

if TYPE_CHECKING:
    from hpctrain.training.settings import Settings


class Replicas(Strategy):
    """A replica of the module a rank, over torch's DistributedDataParallel.

    The first backward pass of a process makes DDP regroup its gradient buckets, which changes the order of
    additions between more than two ranks. A process that resumes would so differ in the last bit from one
    that never stopped. Every process therefore regroups before its first real step, over a graph of its
    own that touches each parameter once and neither data, buffers nor random state.
    """

    has_buckets = True

    def __init__(self, module: Module, team: Team, settings: Settings) -> None:
        """Broadcast rank 0's parameters and buffers. All ranks must call this."""
        super().__init__(module, team, settings)
        self.algorithm: Algorithm = find_algorithm(settings.algorithm)
        # Nothing is put around the module of a rank that is alone.
        self._forward: nn.Module | None = None
        self._forwards: list[nn.Module] = []
        if team.is_distributed and not takes_optimizer_idx(module):
            self._forward = self._averaging()

    def gradient_parts(self) -> list[int]:
        """As DDP fills its buckets: from the last parameter to the first, each until it has enough."""
        if not self.team.is_distributed:
            return []
        limit = (self.settings.bucket_mb or 25) * 2**20
        parts: list[int] = []
        part = 0
        for parameter in reversed(list(self.module.parameters())):
            part += parameter.nbytes if parameter.requires_grad else 0
            if part >= (2**20 if self.settings.bucket_mb is None and not parts else limit):
                parts, part = [*parts, part], 0
        return [*parts, part] if part else parts

    def join(self, output: Any, num_samples: int) -> tuple[Any, float]:
        """What lies between `training_step` and `training_step_end`.

        Makes of a rank's output and its number of samples those that a loss is taken over.
        """
        return output, num_samples

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        if self._forward is None:
            return self._take(batch, batch_idx, num_samples, self.turn)
        try:
            output, counted = self._forward(batch, batch_idx, num_samples, self.turn)
        except RuntimeError as error:
            _explain(error, self.module)
            raise
        return output, counted

    def _take(self, batch: Any, batch_idx: int, num_samples: int, turn: tuple[int, ...]) -> tuple[Any, float]:
        module = self.module
        output, counted = self.join(module.training_step(batch, batch_idx, *turn), num_samples)
        return module.training_step_end(output), counted

    def accumulating(self) -> AbstractContextManager[None]:
        """Forward and backward passes meanwhile add to this rank's gradients and synchronise nothing."""
        if isinstance(self._forward, DistributedDataParallel):
            return self._forward.no_sync()
        return nullcontext()

    def optimized(self, optimization: Optimization) -> Optimization:
        if self.team.is_distributed:
            # Only now are the replicas equal.
            self.algorithm.begin(self.module, self.team)
            for forward in (*self._forwards, self._forward):
                if isinstance(forward, DistributedDataParallel):
                    self.algorithm.attach(forward)
            self.algorithm.optimized(optimization)
        return optimization

    def updated(self, step: int) -> None:
        if self.team.is_distributed:
            self.algorithm.updated(step)

    def align_buffers(self) -> None:
        """Give every rank the buffers of rank 0, such as running means. All ranks must call this.

        A forward pass does so too, before it changes them on each rank by its own samples.
        """
        if self.team.is_distributed:
            self.algorithm.align()
            share_buffers(self.module)

    def take_turns(self, parameters: Sequence[Sequence[torch.Tensor]]) -> None:
        super().take_turns(parameters)
        for own in parameters if self.team.is_distributed else ():
            with toggled(self.module, own):
                self._forwards.append(self._averaging())

    @contextmanager
    def turn_of(self, idx: int) -> Iterator[None]:
        with super().turn_of(idx):
            if self._forwards:
                self._forward = self._forwards[idx]
            yield

    def _averaging(self) -> nn.Module:
        """The step, with gradients averaged over the ranks: those of the parameters that take one now."""
        step = _Step(self.module, self._take)
        if not any(p.requires_grad for p in self.module.parameters()):
            return step
        forward = DistributedDataParallel(
            step,
            device_ids=[self.team.device] if self.team.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.settings.bucket_mb,
            static_graph=self.settings.static_graph,
            find_unused_parameters=self.settings.find_unused_parameters,
            # Replicas that go their own way share theirs where all ranks meet.
            **sharing_buffers(self.algorithm.shares_gradients),
        )
        touched: torch.Tensor = forward(None, 0, 0, touch_only=True)
        torch.autograd.backward(touched)
        forward.zero_grad(set_to_none=True)
        return forward


class _Step(nn.Module):
    """Turns a training step into the forward pass that DDP wraps."""

    def __init__(self, module: Module, take: Callable[..., tuple[Any, float]]) -> None:
        super().__init__()
        self.module = module
        self._take = take

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


def _sum_of_nothing(parameters: list[nn.Parameter]) -> torch.Tensor:
    """A zero that depends on every parameter; its backward pass reaches the last parameter first."""
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        total = total + (parameter * 0).sum().to(total.device, total.dtype)
    return total


def _explain(error: RuntimeError, module: nn.Module) -> None:
    """Say by name which parameters had no part in the step before, where that is what torch has found.

    Raises:
        UserError: there are some, and nobody was told to look for them.
    """
    if "find_unused_parameters=True" not in str(error):
        return
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    names = [trained[int(number)] for number in numbers[1].split()] if numbers else ["some parameters"]
    raise UserError(
        f"{type(module).__name__}.training_step did not use {', '.join(names)}, and ranks would wait for "
        "their gradients. Take them out of the module, or freeze them (requires_grad_(False)); if steps "
        "differ in what they use, set find_unused_parameters=True."
    ) from error
