"""Give the loss the samples of several devices: those of one process (`dp`), or of a node (`ddp2`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.checkpoint.io import messages
from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.text import pluralize
from hpctrain.torch_compat import pytree
from hpctrain.training.base.tensors import slice_batch
from hpctrain.training.data.batch_plan import split_range
from hpctrain.training.data.loader_config import to_device
from hpctrain.training.module import Module, as_scalars, collect_logged, find_run, has_step_end
from hpctrain.training.strategies.ddp import DataParallelBase
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
    """Split a batch, run a step on a copy of the module on each device, and log the means of logged values.

    Returns:
        The outputs of all devices, on the first one: tensors joined along dimension 0, and scalars as a
        vector, or as their mean over the samples if the module does not end the step itself.
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


class DDP2(DataParallelBase):
    """Strategy in which `training_step_end` receives the outputs of all ranks of a node as one batch.

    Each of the node's k ranks computes the same loss over this batch. The backward pass of the gather adds k
    times the gradient for every encoder. For parameters after the gather, each rank has the gradient once.
    The loss is weighted by 1/k of the node's samples. In both cases, the mean over all ranks is then the mean
    over the nodes' batches.
    """

    gathers_samples = uses_all_devices = True

    def __init__(self, module: Module, context: DistributedContext, settings: TrainerConfig) -> None:
        nodes: list[int] = context.all_gather(context.ranks.node_rank) if context.is_distributed else []
        for node in sorted(set(nodes)):
            members = [rank for rank, rank_node in enumerate(nodes) if rank_node == node]
            group = dist.new_group(members)
            control = dist.new_group(members, backend="gloo") if context.device.type == "cuda" else group
            if node == context.ranks.node_rank:
                #: Ranks on the node of this rank, ascending.
                self._members, self._group, self._control = members, group, control
                self._index = members.index(context.ranks.rank)
        # With elastic determinism, each grain is such a batch, and a single rank computes it.
        gathers = context.is_distributed and not settings.elastic_determinism
        steps = ("training_step", "validation_step", "test_step")
        self._gathering = [step for step in steps if gathers and has_step_end(module, step)]
        super().__init__(module, context, settings)

    @property
    def in_lockstep(self) -> bool:  # type: ignore[override]
        return self._gathering not in ([], ["training_step"])

    @property
    def counts_tokens(self) -> bool:
        return "training_step" not in self._gathering

    def evaluation_step(self, method: str, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        output = getattr(self.module, method)(batch, batch_idx)
        output, num_counted = self._gather(method, output, num_samples)
        return self.end_evaluation_step(method, output), num_counted

    def _run_module(
        self, batch: Any, batch_idx: int, num_samples: int, turn: tuple[int, ...]
    ) -> tuple[Any, float]:
        devices, arguments = self.context.devices, (batch_idx, *turn)
        if len(devices) == 1 or self.settings.elastic_determinism:
            output = self.module.training_step(batch, *arguments)
        else:
            output = run_on_devices(self.module, "training_step", batch, arguments, num_samples, devices)
        output, num_counted = self._gather("training_step", output, num_samples)
        return self.module.training_step_end(output), num_counted

    def _gather(self, step: str, output: Any, num_samples: int) -> tuple[Any, float]:
        """Return the outputs of the node's ranks as one batch, and this rank's weight.

        Tensors are joined along dimension 0, in the order of ranks; a scalar becomes a vector with one
        element per rank. The backward pass sums the gradients of each sample over the ranks. With 0 samples,
        `output` contains a spare sample, which is excluded unless no rank has samples.
        """
        # Without `training_step_end`, the loss is computed per rank, so nothing is gathered.
        if step not in self._gathering or (len(self._members) == 1 and len(self.context.devices) > 1):
            return output, num_samples
        leaves, structure = pytree.tree_flatten(output)
        indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        are_scalars = [leaves[index].ndim == 0 for index in indices]
        tensors = [leaves[i].reshape(1) if leaves[i].ndim == 0 else leaves[i] for i in indices]
        num_held = max(1, num_samples)
        shape = f"{structure}: " + "; ".join(
            f"{tensor.dtype} scalar"
            if is_scalar
            else f"{tensor.dtype}, {_rows(len(tensor), num_held)}, each of shape {list(tensor.shape[1:])}"
            for tensor, is_scalar in zip(tensors, are_scalars, strict=True)
        )
        counts = self._agree(num_samples, shape)
        weight = sum(counts) / len(counts)
        if not any(counts):
            counts = [1] * len(counts)
        sizes = [
            [min(count, 1) if is_scalar else count * (len(tensor) // num_held) for count in counts]
            for tensor, is_scalar in zip(tensors, are_scalars, strict=True)
        ]
        if tensors:
            rows = [tensor[: size[self._index]] for tensor, size in zip(tensors, sizes, strict=True)]
            joined = _Gather.apply(self._group, self._index, sizes, *rows)  # type: ignore[no-untyped-call]
            for index, tensor in zip(indices, joined, strict=True):
                leaves[index] = tensor
        return pytree.tree_unflatten(leaves, structure), weight

    def _agree(self, num_samples: int, shape: str) -> list[int]:
        digest = hashlib.blake2b(shape.encode(), digest_size=7).digest()
        message = torch.tensor([num_samples, int.from_bytes(digest, "little")])
        gathered = [torch.empty_like(message) for _ in self._members]
        dist.all_gather(gathered, message, self._control)
        if len({int(digest) for _, digest in gathered}) > 1 or "not a multiple" in shape:
            shapes = messages.gather(self._control, (num_samples, shape))
            lines = [
                f"rank {rank}, {pluralize(count, 'sample')}: {shape}"
                for rank, (count, shape) in zip(self._members, shapes, strict=True)
            ]
            raise UserError(
                "training_step returned outputs that cannot be concatenated across the ranks of the "
                "node:\n"
                + "\n".join(lines)
                + "\nThe first dimension of each tensor must be a multiple of the number of samples. "
                "Containers, data types and other dimensions must be the same on every rank."
            )
        return [int(count) for count, _ in gathered]


def _rows(length: int, num_samples: int) -> str:
    if length % num_samples:
        return f"{length} rows (not a multiple of {num_samples} samples)"
    return f"{pluralize(length // num_samples, 'row')} per sample"


class _Gather(torch.autograd.Function):
    """Join of all ranks' tensors; the backward pass sums the gradients of all ranks for a rank's samples."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, index: int, sizes: Sequence[list[int]], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.index, ctx.sizes = group, index, sizes
        joined = []
        for tensor, size in zip(tensors, sizes, strict=True):
            # Collectives need equal shapes: each rank's tensor is padded to the longest.
            padded = tensor.new_zeros((max(size), *tensor.shape[1:]))
            padded[: len(tensor)] = tensor
            gathered = [torch.empty_like(padded) for _ in size]
            dist.all_gather(gathered, padded, group)
            joined.append(torch.cat([rows[:length] for rows, length in zip(gathered, size, strict=True)]))
        ctx.mark_non_differentiable(*(tensor for tensor in joined if not tensor.is_floating_point()))
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        results: list[torch.Tensor | None] = []
        for gradient, size in zip(gradients, ctx.sizes, strict=True):
            if not gradient.is_floating_point():
                results.append(None)  # such as labels
                continue
            total = gradient.contiguous().clone()
            dist.all_reduce(total, group=ctx.group)
            start = sum(size[: ctx.index])
            results.append(total[start : start + size[ctx.index]])
        return (None, None, None, *results)
