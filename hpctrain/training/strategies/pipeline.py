"""Pipeline parallelism: each rank computes a stage of the module, and micro-batches run through the stages.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019; Narayanan
et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, for the order of the passes
(1F1B). torch.distributed.pipelining runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils import _pytree as pytree

from hpctrain.cluster import Ranks
from hpctrain.errors import UserError
from hpctrain.runtime.process_group import Team
from hpctrain.training.data.plan import Deal
from hpctrain.training.micro_batches import left_as_it_was
from hpctrain.training.module import Module, as_scalars
from hpctrain.training.optimization import Optimization
from hpctrain.training.report import TOKENS
from hpctrain.training.strategies.base import Strategy
from hpctrain.training.strategies.stages import Stages

if TYPE_CHECKING:
    from hpctrain.training.settings import Settings

#: Micro-batches a stage, where nothing is said: the more, the less the stages wait for each other.
_MICRO_BATCHES_A_STAGE = 4


class Pipeline(Strategy):
    """Every rank has the global batch; rank r updates the parameters of stage r.

    The weights of all stages stay on every rank, and are brought up to date before a validation, which the
    ranks share as ever, and before a checkpoint, which fits any number of stages and any other strategy.
    """

    splits_itself = True
    has_turns = False

    @classmethod
    def check(cls, settings: Settings) -> None:
        if settings.precision == "16-mixed":
            raise UserError(
                "precision '16-mixed' does not go with strategy 'pipeline', whose schedule takes the loss "
                "into the backward pass before it could be scaled. Take 'bf16-mixed'."
            )
        if settings.micro_batch_size == "auto":
            raise UserError(
                "micro_batch_size is 'auto', but with strategy 'pipeline' the ranks wait for each other in "
                "every pass, and one of them may run out of memory while it is tried. Give a number."
            )

    @classmethod
    def deal(cls, _ranks: Ranks) -> Deal:
        return Deal(0, 1)

    def __init__(self, module: Module, team: Team, settings: Settings) -> None:
        """Cut the module into stages, and broadcast rank 0's parameters. All ranks must call this.

        Raises:
            UserError: it has nothing to cut into as many stages as there are ranks.
        """
        super().__init__(module, team, settings)
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._is_pending = False
        if team.is_distributed:
            self._stages = Stages(module, team.ranks.rank, team.ranks.world_size)
            self._is_last = team.ranks.rank == team.ranks.world_size - 1
            self._shapes: dict[Any, tuple[Any, Any]] = {}
            self._names: list[str] = []
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.data, src=0)

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        if not self.team.is_distributed:
            return super().training_step(batch, batch_idx, num_samples)
        self._is_pending = True
        where = (batch_idx, *self.turn)
        parts = _parts(batch, num_samples, self._count(num_samples))
        ended: list[dict[str, torch.Tensor]] = []

        def loss_of(output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
            scalars = as_scalars(
                self._stages.end(output, parts[int(number)], where), "loss", type(self.module).__name__
            )
            if TOKENS in scalars:
                raise UserError(
                    f"training_step returned {TOKENS!r}, but with strategy 'pipeline' a loss counts samples."
                )
            ended.append({name: value.detach() for name, value in scalars.items()})
            return scalars["loss"] / len(parts)

        self._run(parts, where, loss_of)
        return self._scalars(ended, num_samples)

    def backward(self, loss: torch.Tensor) -> None:
        """The schedule has gone through the backward passes already."""

    def optimized(self, optimization: Optimization) -> Optimization:
        self._optimizers = optimization.optimizers
        return optimization

    def before_update(self) -> None:
        """Add up the gradients of what is in no stage alone, or in several."""
        if not (self._is_pending and self.team.is_distributed):
            return
        self._is_pending = False
        shared = self._stages.shared
        has = torch.tensor([parameter.grad is not None for parameter in shared], dtype=torch.int32)
        dist.all_reduce(has, group=self.team.control)
        for parameter, anywhere in zip(shared, has.tolist(), strict=True):
            if anywhere:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)

    def gradient_norm(self, parameters: Iterable[torch.Tensor], p: float = 2.0) -> torch.Tensor:
        if not self.team.is_distributed:
            return super().gradient_norm(parameters, p)
        shared = set(self._stages.shared)
        with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
        own = super().gradient_norm([each for each in with_gradient if each not in shared], p).float()
        alike = super().gradient_norm([each for each in with_gradient if each in shared], p).float()
        if p == float("inf"):
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            return torch.maximum(own, alike)
        powers = own**p
        dist.all_reduce(powers)
        return torch.pow(powers + alike**p, 1 / p)

    def align_buffers(self) -> None:
        """Bring parameters, buffers and what optimizers keep up to date on every rank."""
        if not self.team.is_distributed:
            return
        for rank, owned in enumerate(self._stages.owned):
            for tensor in (*owned, *self._stages.buffers[rank]):
                dist.broadcast(tensor.data, src=rank)
            kept: list[Any] = [[optimizer.state.get(p) for p in owned] for optimizer in self._optimizers]
            box = [pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, kept)]
            dist.broadcast_object_list(box, src=rank, group=self.team.control)
            if rank != self.team.ranks.rank:
                for optimizer, states in zip(self._optimizers, box[0], strict=True):
                    _keep(optimizer, owned, states)
        for optimizer in self._optimizers:
            _put_in_order(optimizer)

    def _count(self, num_samples: int) -> int:
        """Micro-batches of a step: equally large ones, for stages have memory for one size."""
        size = self.settings.micro_batch_size
        divisors = [count for count in range(1, num_samples + 1) if num_samples % count == 0]
        if isinstance(size, int):
            return next(count for count in divisors if num_samples // count <= size)
        most = _MICRO_BATCHES_A_STAGE * self.team.ranks.world_size
        return max(count for count in divisors if count <= most)

    def _run(self, parts: list[Any], where: tuple[int, ...], loss_of: Any) -> None:
        ranks, device = self.team.ranks, self.team.device
        inputs, output = self._find_shapes(parts[0], where)
        stage = PipelineStage(
            _Stage(self._stages, parts, where),
            ranks.rank,
            ranks.world_size,
            device,
            input_args=inputs,
            output_args=output,
        )
        kind = Schedule1F1B if len(parts) >= ranks.world_size else ScheduleGPipe
        # The loss is divided above: torch would divide gradients, but sees only those inside of the stages.
        schedule = kind(stage, len(parts), loss_fn=loss_of, scale_grads=False)
        numbers = torch.arange(len(parts), device=device)
        if ranks.rank == 0:
            schedule.step(numbers)
        elif self._is_last:
            schedule.step(target=numbers)
        else:
            schedule.step()

    def _find_shapes(self, batch: Any, where: tuple[int, ...]) -> tuple[Any, Any]:
        """What goes into this rank's stage and what comes out, for micro-batches that look like this one.

        The first time, one goes through the stages without a gradient, and leaves nothing behind.
        """
        look = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None
            for leaf in pytree.tree_leaves(batch)
        )
        looks = (look, torch.is_autocast_enabled(self.team.device.type))
        if looks not in self._shapes:
            number = torch.zeros(1, dtype=torch.int64, device=self.team.device)
            box: list[Any] = [None]
            inputs = output = number
            with left_as_it_was(self.module), torch.no_grad():
                for rank in range(self.team.ranks.world_size):
                    if rank == self.team.ranks.rank:
                        if rank > 0:
                            inputs = torch.zeros(box[0][0], dtype=box[0][1], device=self.team.device)
                        output = self._stages.forward(inputs, batch, where)
                        box = [(output.shape, output.dtype)]
                    dist.broadcast_object_list(box, src=rank, group=self.team.control)
            # The schedule takes from these what it is to receive, and whether gradients go back.
            self._shapes[looks] = inputs.requires_grad_(inputs.is_floating_point()), output.requires_grad_()
        return self._shapes[looks]

    def _scalars(self, ended: list[dict[str, torch.Tensor]], num_samples: int) -> tuple[Any, float]:
        """Means over the micro-batches, which the last rank has; on the others zeros that do not count."""
        if not self._names:
            box = [list(ended[0]) if self._is_last else None]
            dist.broadcast_object_list(box, src=self.team.ranks.world_size - 1, group=self.team.control)
            self._names = box[0] or []
        if not self._is_last:
            return {name: torch.zeros((), device=self.team.device) for name in self._names}, 0
        return {name: torch.stack([each[name] for each in ended]).mean() for name in self._names}, num_samples


class _Stage(nn.Module):
    """This rank's stage, as torch's schedules call it: the first one with the number of a micro-batch."""

    def __init__(self, stages: Stages, parts: list[Any], where: tuple[int, ...]) -> None:
        super().__init__()
        self._stages, self._parts, self._where = stages, parts, where

    def forward(self, held: torch.Tensor) -> torch.Tensor:
        batch = self._parts[int(held)] if held.dtype == torch.int64 and held.numel() == 1 else None
        return self._stages.forward(held, batch, self._where)


def _parts(batch: Any, num_samples: int, count: int) -> list[Any]:
    """The batch in equal parts."""
    size = num_samples // count

    def rows(number: int) -> Any:
        return pytree.tree_map_only(
            torch.Tensor,
            lambda tensor: (
                tensor[number * size : (number + 1) * size]
                if tensor.ndim and len(tensor) == num_samples
                else tensor
            ),
            batch,
        )

    return [rows(number) for number in range(count)]


def _keep(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], states: list[Any]) -> None:
    """Give an optimizer what another rank's keeps for these parameters."""
    for parameter, state in zip(parameters, states, strict=True):
        if state is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = {
                name: value.to(parameter.device)
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
                else value
                for name, value in state.items()
            }


def _put_in_order(optimizer: torch.optim.Optimizer) -> None:
    """Have every rank's optimizer keep things in one order, whichever it had first."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(parameter)
