"""ZeRO stages 2 and 3: parameters, gradients and what optimizers keep are cut over the ranks.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020; Zhao et al.,
"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023. torch's `fully_shard` does the work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from hpctrain.errors import UserError
from hpctrain.training.optimization import Optimization
from hpctrain.training.strategies.base import Strategy
from hpctrain.training.strategies.buffers import share_buffers
from hpctrain.training.strategies.parts import Parts, check_whole, gradient_norm
from hpctrain.training.strategies.take_apart import make_whole, room_for_whole
from hpctrain.training.strategies.units import find_units

if TYPE_CHECKING:
    from hpctrain.training.settings import Settings


class Sharded(Strategy):
    """Each rank keeps some rows of every parameter, with their gradients and what the optimizer keeps.

    A block of the module is brought together from all ranks when it computes.
    """

    in_lockstep = True
    has_turns = False
    reshard_after_forward: ClassVar[bool | None]
    """Whether a block is cut again after its forward pass; None: all but what stands outside of blocks."""
    averages_every_micro_batch: ClassVar[bool] = True
    """Whether gradients are averaged and cut in every micro-batch, and not only in the last one: kept whole
    so long, they take the memory that is to be saved."""

    @classmethod
    def check(cls, settings: Settings) -> None:
        if settings.micro_batch_size == "auto":
            raise UserError(
                f"micro_batch_size is 'auto', but with strategy {settings.strategy!r} the ranks wait for "
                "each other in every forward pass, and one of them may run out of memory while it is tried. "
                "Give a number."
            )

    def place(self) -> None:
        """Cut the module, a block at a time, so that no rank has to have it whole on its device."""
        self._root: Callable[..., Any] = _Root(self.module)
        self._scalars = {parameter for parameter in self.module.parameters() if parameter.ndim == 0}
        self._is_pending = False
        if not self.team.is_distributed:
            self.module.to(self.team.device)
            return
        device = self.team.device
        self._mesh = init_device_mesh(device.type, (self.team.ranks.world_size,))
        self._parts = Parts(self._mesh)
        for scalar in self._scalars:
            self._broadcast(scalar)
        for unit in [*reversed(find_units(self.module)), self._root]:
            assert isinstance(unit, nn.Module)
            for parameter in unit.parameters():
                if not isinstance(parameter, DTensor) and parameter.ndim:
                    self._broadcast(parameter)
            fully_shard(
                unit,
                mesh=self._mesh,
                reshard_after_forward=self.reshard_after_forward,
                ignored_params=self._scalars,
            )
        share_buffers(self.module)

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        self._is_pending = True
        if self.team.is_distributed:
            share_buffers(self.module)
        with _explained():
            output: tuple[Any, float] = self._root(super().training_step, batch, batch_idx, num_samples)
        return output

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        late = [] if self.averages_every_micro_batch else self._cut_modules()
        for part in late:
            part.set_requires_gradient_sync(False, recurse=False)
        yield
        for part in late:
            part.set_requires_gradient_sync(True, recurse=False)

    def evaluation_step(self, method: str, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, int]:
        with _explained():
            output: tuple[Any, int] = self._root(
                super().evaluation_step, method, batch, batch_idx, num_samples
            )
        for part in self._cut_modules():
            part.reshard()  # No backward pass comes that would.
        return output

    def optimized(self, optimization: Optimization) -> Optimization:
        if self.team.is_distributed:
            check_whole(self.module, optimization.optimizers)
            for optimizer in optimization.optimizers:
                self._parts.put_into(optimizer, self.before_update)
        return optimization

    def before_update(self) -> None:
        """Average the gradients of parameters that cannot be cut; the others are averaged already."""
        if not (self._is_pending and self.team.is_distributed):
            return
        self._is_pending = False
        self._average_those_of_scalars()
        self._parts.give_gradients()

    def _average_those_of_scalars(self) -> None:
        gradients = [scalar.grad for scalar in self._scalars if scalar.grad is not None]
        if gradients:
            together = torch.stack(gradients) / self.team.ranks.world_size
            dist.all_reduce(together)
            for gradient, mean in zip(gradients, together, strict=True):
                gradient.copy_(mean)

    def gradient_norm(self, parameters: Iterable[torch.Tensor], p: float = 2.0) -> torch.Tensor:
        if not self.team.is_distributed:
            return super().gradient_norm(parameters, p)
        return gradient_norm(parameters, self.team.device, p)

    def align_buffers(self) -> None:
        if self.team.is_distributed:
            share_buffers(self.module)

    def finish(self) -> str | None:
        """Bring the parameters together on every rank, where they fit into the memory of its device."""
        if not self.team.is_distributed:
            return None
        if self.team.lowest(float(room_for_whole(self.module, self.team.device))) < 1:
            return (
                "the whole module does not fit into the memory of one device: after the training it is left "
                "in parts. `hpctrain checkpoints export` writes the weights of a checkpoint into one file."
            )
        make_whole(self.module)
        return None

    def _broadcast(self, parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.to(self.team.device)
        dist.broadcast(parameter.data, src=0)

    def _cut_modules(self) -> list[FSDPModule]:
        root = self._root
        assert isinstance(root, nn.Module)
        return [part for part in root.modules() if isinstance(part, FSDPModule)]


class ZeRO2(Sharded):
    """A block that was brought together for the forward pass stays so until the backward pass."""

    reshard_after_forward = False


class ZeRO3(Sharded):
    """A block is brought together for its forward pass, cut, and brought together for its backward pass."""

    reshard_after_forward = None


class _Root(nn.Module):
    """What `fully_shard` wraps as the whole: any computation with the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say what torch means where a parameter is used outside of the block that it belongs to."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            error.add_note(
                "hpctrain: a parameter was used while it was in parts. What stands in a Sequential, "
                "ModuleList or ModuleDict has its parameters whole only while it is called itself: call the "
                "block, and not what is inside of it."
            )
        raise
