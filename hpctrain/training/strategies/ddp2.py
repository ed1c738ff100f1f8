"""Give the loss the samples of all ranks of a node."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.checkpoint.io import messages
from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.text import pluralize
from hpctrain.torch_compat import pytree
from hpctrain.training.module import Module, has_step_end
from hpctrain.training.strategies.ddp import DataParallelBase
from hpctrain.training.strategies.dp import run_on_devices
from hpctrain.training.trainer_config import TrainerConfig


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
