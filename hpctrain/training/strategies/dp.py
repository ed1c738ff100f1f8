"""Data parallelism in one process on several devices, for old scripts."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.torch_compat import pytree
from hpctrain.training.base.tensors import slice_batch
from hpctrain.training.data.batch_plan import split_range
from hpctrain.training.data.loader_config import to_device
from hpctrain.training.module import Module, as_scalars, collect_logged, find_run, has_step_end
from hpctrain.training.strategies.base import Strategy

if TYPE_CHECKING:
    from hpctrain.training.trainer_config import TrainerConfig


class DP(Strategy):
    """Strategy that splits the batch, copies the module to all devices and gathers outputs in each step."""

    single_process = uses_all_devices = True
    remarks = ("Strategy 'dp' copies the module to every device in every step; 'ddp' is faster.",)

    def __init__(self, module: Module, context: DistributedContext, settings: TrainerConfig) -> None:
        if context.is_distributed:
            raise UserError(
                f"Strategy 'dp' runs in one process, but there are {context.ranks.world_size} ranks "
                f"({context.ranks.environment}). Use 'ddp', which is also faster, or 'ddp2'."
            )
        super().__init__(module, context, settings)
        self._devices = context.devices

    @property
    def counts_tokens(self) -> bool:
        return len(self._devices) == 1

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        arguments = (batch_idx, *self.optimizer_idx)
        joined = run_on_devices(self.module, "training_step", batch, arguments, num_samples, self._devices)
        return self.module.training_step_end(joined), num_samples

    def evaluation_step(self, method: str, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        if not has_step_end(self.module, method):
            return super().evaluation_step(method, batch, batch_idx, num_samples)
        joined = run_on_devices(self.module, method, batch, (batch_idx,), num_samples, self._devices)
        return self.end_evaluation_step(method, joined), num_samples

    def trial_step(self, batch: Any) -> Any:
        num_samples = next(len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        return self.training_step(batch, 0, num_samples)[0]


def run_on_devices(
    module: Module,
    step: str,
    batch: Any,
    arguments: tuple[int, ...],
    num_samples: int,
    devices: tuple[torch.device, ...],
) -> Any:
    """Split a batch, run a step on a copy of the module on each device, and log the means of logged values."""
    parts = _parts(batch, max(1, num_samples), devices)
    copies = [module, *(_copy(module, device) for device in devices[1 : len(parts)])]
    outputs, logged = [], []
    for copy, (part, count) in zip(copies, parts, strict=True):
        with collect_logged(module, count) as values:
            outputs.append(getattr(copy, step)(part, *arguments))
        logged.append(as_scalars(values, "", f"{type(module).__name__}.log"))
    weights = torch.tensor([float(count) for _, count in parts], device=devices[0])
    if any(logged):
        find_run(module).log_values(_means(_joined(logged, devices[0]), weights))
    joined = _joined(outputs, devices[0])
    return joined if has_step_end(module, step) else _means(joined, weights)


def _parts(batch: Any, num_samples: int, devices: tuple[torch.device, ...]) -> list[tuple[Any, int]]:
    count = min(len(devices), num_samples)
    parts = []
    for number, device in zip(range(count), devices, strict=False):
        low, high = split_range(num_samples, number, count)
        part = slice_batch(batch, num_samples, low, high)
        parts.append((to_device(part, device), high - low))
    return parts


def _copy(module: Module, device: torch.device) -> Any:
    """Return the module with its parameters copied to `device`; gradients are added to the originals."""
    copies: dict[nn.Module, Any] = {}
    for part in module.modules():
        # Protocol of torch, which some layers extend.
        copies[part] = part._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    for part, copy in copies.items():
        for name, child in part._modules.items():
            copy._modules[name] = None if child is None else copies[child]
        for name, parameter in part._parameters.items():
            # A plain attribute: registered parameters must be leaves.
            setattr(copy, name, None if parameter is None else parameter.to(device))
        for name, buffer in part._buffers.items():
            copy._buffers[name] = None if buffer is None else buffer.to(device, copy=True)
        # Methods replaced by `recompute` and `compile` must use the copy.
        for name, value in vars(part).items():
            if type(value) is partial:
                vars(copy)[name] = partial(value.func, *(_rebound(each, part, copy) for each in value.args))
    return copies[module]


def _rebound(value: Any, part: nn.Module, copy: Any) -> Any:
    """Return the copy in place of a part of the module, and the copy's method in place of the part's."""
    if value is part:
        return copy
    is_method = isinstance(value, MethodType) and value.__self__ is part
    return MethodType(value.__func__, copy) if is_method else value


def _joined(outputs: list[Any], device: torch.device) -> Any:
    structure = pytree.tree_structure(outputs[0])
    joined = []
    for leaves in zip(*(pytree.tree_flatten(output)[0] for output in outputs), strict=True):
        if isinstance(leaves[0], (torch.Tensor, int, float)):
            tensors = [torch.as_tensor(leaf, device=device) for leaf in leaves]
            joined.append(torch.cat([each.reshape(1) if each.ndim == 0 else each for each in tensors]))
        else:
            joined.append(leaves[0])
    return pytree.tree_unflatten(joined, structure)


def _means(joined: Any, weights: torch.Tensor) -> Any:

    def mean(each: torch.Tensor) -> torch.Tensor:
        return (each * weights.to(each.dtype)).sum() / weights.sum() if each.shape == weights.shape else each

    return pytree.tree_map_only(torch.Tensor, mean, joined)
