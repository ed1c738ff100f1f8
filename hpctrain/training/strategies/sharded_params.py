"""Sharded views of parameters for optimizers, as DTensors on the memory of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpctrain.errors import UserError
from hpctrain.torch_compat import all_gather_single
from hpctrain.training.base.tensors import group_by_type, is_sharded, local_part
from hpctrain.training.module import Module

#: Optimizers whose updates are impossible with shards, and the reason.
_UNSUPPORTED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adafactor: "needs complete rows and columns of each parameter",
    torch.optim.Adagrad: "creates its state before the parameters are sharded",
    torch.optim.Rprop: "selects elements by conditions, which torch does not support for shards",
}


class ShardedParameters:
    """DTensor shards of replicated parameters: the rows of this rank, in the same memory."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._parts: dict[nn.Parameter, nn.Parameter] = {}

    def shard_optimizer(self, optimizer: torch.optim.Optimizer, before_step: Callable[[], None]) -> None:
        """Replace the complete parameters of an optimizer with their parts."""
        if reason := _UNSUPPORTED.get(type(optimizer)):
            raise UserError(
                f"{type(optimizer).__name__} {reason}, so it cannot be used with strategies that shard "
                "parameters or optimizer states. Use another optimizer, such as AdamW, or strategy 'ddp'."
            )
        if optimizer.state:
            raise UserError(
                f"The {type(optimizer).__name__} returned by configure_optimizers() has already performed "
                "steps, so its state cannot be sharded. Create a new optimizer in this method."
            )
        for group in optimizer.param_groups:
            group["params"] = [
                parameter if isinstance(parameter, DTensor) else self._part(parameter)
                for parameter in group["params"]
            ]
        forget_parts = optimizer.zero_grad
        wholes = [whole for whole, part in self._parts.items() if _holds(optimizer, part)]

        def zero_grad(set_to_none: bool = True) -> None:
            forget_parts(set_to_none)
            for whole in wholes:
                if set_to_none:
                    whole.grad = None
                elif whole.grad is not None:
                    whole.grad.zero_()

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(lambda *_: before_step())

    def assign_gradients(self) -> None:
        """Assign to each part its rows of the complete gradient, in the same memory."""
        for whole, part in self._parts.items():
            part.grad = None if whole.grad is None else self._cut(whole.grad)

    def gather(self, optimizer: torch.optim.Optimizer, bucket_bytes: int = 25 << 20) -> None:
        """Gather the complete parameters from the parts updated by the ranks."""
        cut = [
            whole
            for whole, part in self._parts.items()
            if whole.ndim and whole.numel() and whole.requires_grad and _holds(optimizer, part)
        ]
        for bucket in _buckets(cut, bucket_bytes):
            self._gather(bucket)

    def _gather(self, wholes: list[nn.Parameter]) -> None:
        num_ranks = self._mesh.size()
        lengths = [-(-len(whole) // num_ranks) * (whole.numel() // len(whole)) for whole in wholes]
        own = torch.empty(sum(lengths), dtype=wholes[0].dtype, device=wholes[0].device)
        everyone = own.new_empty(num_ranks * len(own))
        with torch.no_grad():
            for whole, room in zip(wholes, torch.split(own, lengths), strict=True):
                rows = self._rows(whole).reshape(-1)
                room[: len(rows)] = rows
            all_gather_single(everyone, own, group=self._mesh.get_group())
            columns_of = torch.split(everyone.view(num_ranks, -1), lengths, dim=1)
            for whole, columns in zip(wholes, columns_of, strict=True):
                whole.copy_(columns.reshape(-1)[: whole.numel()].view_as(whole))

    def _part(self, whole: nn.Parameter) -> nn.Parameter:
        if whole not in self._parts:
            self._parts[whole] = nn.Parameter(self._cut(whole.detach()), requires_grad=whole.requires_grad)
        return self._parts[whole]

    def _cut(self, whole: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            self._rows(whole),
            self._mesh,
            [Shard(0) if whole.ndim else Replicate()],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    def _rows(self, whole: torch.Tensor) -> torch.Tensor:
        if whole.ndim == 0:
            return whole
        each = -(-len(whole) // self._mesh.size())
        first = min(self._mesh.get_local_rank() * each, len(whole))
        return whole[first : first + each]


def gradient_norm(parameters: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the norm of all gradients, complete or sharded."""
    cut: list[torch.Tensor] = []
    whole: list[torch.Tensor] = []
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        (cut if is_sharded(gradient) else whole).append(local_part(gradient))
    return joint_norm(cut, whole, device)


def joint_norm(
    own: Sequence[torch.Tensor], shared: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return the norm of the `own` gradients of all ranks, and of those equal on all ranks."""
    of_own, of_shared = (
        torch.nn.utils.get_total_norm(gradients).to(device, torch.float32) for gradients in (own, shared)
    )
    squares = of_own**2.0
    dist.all_reduce(squares)
    return torch.pow(squares + of_shared**2.0, 0.5)


def check_module_parameters(module: Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Check that optimizers contain the current parameters of the module, not those before sharding."""
    own = set(module.parameters())
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            if parameter not in own:
                raise UserError(
                    f"The {type(optimizer).__name__} returned by {type(module).__name__}."
                    f"configure_optimizers() has a parameter of shape {tuple(parameter.shape)} that the "
                    "module does not have. Parameters are sharded before this method is called, so "
                    "create the optimizer in this method, from self.parameters()."
                )


def _holds(optimizer: torch.optim.Optimizer, part: nn.Parameter) -> bool:
    return any(part is parameter for parameter in _parameters(optimizer))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _buckets(tensors: Iterable[nn.Parameter], limit_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield groups of tensors of one dtype and device, each up to the limit."""
    for alike in group_by_type(tensors):
        bucket: list[nn.Parameter] = []
        for tensor in alike:
            if bucket and sum(other.nbytes for other in bucket) + tensor.nbytes > limit_bytes:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket
