"""Give the loss the samples of all devices of one process."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.torch_compat import pytree
from hpctrain.training.base.tensors import slice_batch
from hpctrain.training.data.batch_plan import split_range
from hpctrain.training.data.loader_config import to_device
from hpctrain.training.module import Module, as_scalars, collect_logged, find_run, has_step_end
from hpctrain.training.strategies.strategy import Strategy
from hpctrain.training.trainer_config import TrainerConfig


class DP(Strategy):
    """Strategy that splits the batch, copies the module to all devices and gathers outputs in each step.

    `training_step_end` receives the outputs of the complete batch: tensors joined along their first
    dimension, and scalars as a vector with one element per device. A module without this method returns means
    over a device's samples, which are averaged with the number of samples as weights.

    Buffers, such as running means, are updated from the samples of the first device only.
    """

    single_process = uses_all_devices = True
    remarks = ("Strategy 'dp' copies the module to every device in every step; 'ddp' is faster.",)

    def __init__(self, module: Module, context: DistributedContext, settings: TrainerConfig) -> None:
        if context.is_distributed:
            raise UserError(
                f"Strategy 'dp' runs in one process, but there are {context.ranks.world_size} ranks "
                f"({context.ranks.environment}). Use 'ddp', which is also faster, or 'ddp2'."
            )
        super().__init__(module, context, settings)

    @property
    def counts_tokens(self) -> bool:
        return len(self.context.devices) == 1

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        arguments = (batch_idx, *self.optimizer_idx)
        devices = self.context.devices
        joined = run_on_devices(self.module, "training_step", batch, arguments, num_samples, devices)
        return self.module.training_step_end(joined), num_samples

    def evaluation_step(self, method: str, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        if not has_step_end(self.module, method):
            return super().evaluation_step(method, batch, batch_idx, num_samples)
        devices = self.context.devices
        joined = run_on_devices(self.module, method, batch, (batch_idx,), num_samples, devices)
        return self.end_evaluation_step(method, joined), num_samples


def run_on_devices(
    module: Module,
    step: str,
    batch: Any,
    arguments: tuple[int, ...],
    num_samples: int,
    devices: tuple[torch.device, ...],
) -> Any:
    """Split a batch, run a step on a copy of the module per device, and return outputs and log means.

    Tensors are joined along dimension 0, and scalars become a vector, or their mean over the samples if the
    module does not end the step itself.
    """
    num_samples = max(1, num_samples)
    devices = devices[:num_samples]
    replicas = [module, *(_copy(module, device) for device in devices[1:])]
    outputs, logged, counts = [], [], []
    for number, (replica, device) in enumerate(zip(replicas, devices, strict=True)):
        start, end = split_range(num_samples, number, len(devices))
        samples = to_device(slice_batch(batch, num_samples, start, end), device)
        with collect_logged(module, end - start) as values:
            outputs.append(getattr(replica, step)(samples, *arguments))
        logged.append(as_scalars(values, "", f"{type(module).__name__}.log"))
        counts.append(float(end - start))
    weights = torch.tensor(counts, device=devices[0])
    if any(logged):
        find_run(module).log_values(_means(_join(logged, devices[0]), weights))
    joined = _join(outputs, devices[0])
    return joined if has_step_end(module, step) else _means(joined, weights)


def _copy(module: Module, device: torch.device) -> Any:
    """Return the module with its parameters copied to `device`; gradients are added to the originals."""
    copies: dict[nn.Module, Any] = {}
    for layer in module.modules():
        # Protocol of torch, which some layers extend.
        copies[layer] = layer._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    for layer, copy in copies.items():
        for name, child in layer._modules.items():
            copy._modules[name] = None if child is None else copies[child]
        for name, parameter in layer._parameters.items():
            # A plain attribute: registered parameters must be leaves.
            setattr(copy, name, None if parameter is None else parameter.to(device))
        for name, buffer in layer._buffers.items():
            copy._buffers[name] = None if buffer is None else buffer.to(device, copy=True)
        # Methods replaced by `recompute` and `compile` must use the copy.
        for name, value in vars(layer).items():
            if type(value) is partial:
                arguments = (_rebind(argument, layer, copy) for argument in value.args)
                vars(copy)[name] = partial(value.func, *arguments)
    return copies[module]


def _rebind(value: Any, layer: nn.Module, copy: Any) -> Any:
    """Return the copy in place of the layer, and the copy's method in place of the layer's."""
    if value is layer:
        return copy
    is_method = isinstance(value, MethodType) and value.__self__ is layer
    return MethodType(value.__func__, copy) if is_method else value


def _join(outputs: list[Any], device: torch.device) -> Any:
    structure = pytree.tree_structure(outputs[0])
    joined = []
    for leaves in zip(*(pytree.tree_flatten(output)[0] for output in outputs), strict=True):
        if isinstance(leaves[0], (torch.Tensor, int, float)):
            tensors = [torch.as_tensor(leaf, device=device) for leaf in leaves]
            joined.append(torch.cat([t.reshape(1) if t.ndim == 0 else t for t in tensors]))
        else:
            joined.append(leaves[0])
    return pytree.tree_unflatten(joined, structure)


def _means(joined: Any, weights: torch.Tensor) -> Any:

    def mean(values: torch.Tensor) -> torch.Tensor:
        if values.shape != weights.shape:
            return values
        return (values * weights.to(values.dtype)).sum() / weights.sum()

    return pytree.tree_map_only(torch.Tensor, mean, joined)
