"""DDP2: one process per device, but one batch per node; gradients are averaged across nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from hpctrain.training.trainer_config import TrainerConfig


class DDP2(DataParallelBase):
    """Strategy in which `training_step_end` receives the outputs of all ranks of a node as one batch.

    Each of the node's k ranks computes the same loss over this batch. The backward pass of the gather adds k
    times the gradient for every encoder. For parameters after the gather, each rank has the gradient once.
    The loss is weighted by 1/k of the node's samples. In both cases, the mean over all ranks is then the mean
    over the nodes' batches.

    A rank with several devices splits its samples among them, as `dp` does. With one rank per node, nothing
    is gathered from other processes.
    """

    gathers_samples = uses_all_devices = True

    def __init__(self, module: Module, context: DistributedContext, settings: TrainerConfig) -> None:
        """Find the ranks of this node, and broadcast rank 0's parameters. All ranks must call this."""
        self._node = NodeGather(context) if context.is_distributed else None
        # With elastic determinism, each grain is such a batch, and a single rank computes it.
        gathers = self._node is not None and not settings.elastic_determinism
        steps = ("training_step", "validation_step", "test_step")
        self._gathering = [step for step in steps if gathers and has_step_end(module, step)]
        super().__init__(module, context, settings)

    @property
    def in_lockstep(self) -> bool:  # type: ignore[override]
        return self._gathering not in ([], ["training_step"])

    @property
    def counts_tokens(self) -> bool:
        return "training_step" not in self._gathering

    def join(self, output: Any, num_samples: int) -> tuple[Any, float]:
        # Without `training_step_end`, the loss is computed per rank, so nothing is gathered.
        return self._gather("training_step", output, num_samples)

    def evaluation_step(self, method: str, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        output = getattr(self.module, method)(batch, batch_idx)
        output, counted = self._gather(method, output, num_samples)
        return self.end_evaluation_step(method, output), counted

    def _gather(self, step: str, output: Any, num_samples: int) -> tuple[Any, float]:
        if step not in self._gathering:
            return output, num_samples
        assert self._node is not None
        if len(self._node.members) == 1 and len(self.context.devices) > 1:
            return output, num_samples
        return self._node.gather(output, num_samples)

    def _run_module(
        self, batch: Any, batch_idx: int, num_samples: int, turn: tuple[int, ...]
    ) -> tuple[Any, float]:
        devices, arguments = self.context.devices, (batch_idx, *turn)
        if len(devices) == 1 or self.settings.elastic_determinism:
            return super()._run_module(batch, batch_idx, num_samples, turn)
        output = run_on_devices(self.module, "training_step", batch, arguments, num_samples, devices)
        joined, counted = self.join(output, num_samples)
        return self.module.training_step_end(joined), counted


class NodeGather:
    """Ranks on the node of this rank, and their process groups.

    Attributes:
        members: ranks of the node, ascending.
        group: their process group, with the same backends as the job.
    """

    def __init__(self, context: DistributedContext) -> None:
        nodes: list[int] = context.all_gather(context.ranks.node_rank)
        for node in sorted(set(nodes)):
            members = [rank for rank, its_node in enumerate(nodes) if its_node == node]
            group = dist.new_group(members)
            control = dist.new_group(members, backend="gloo") if context.device.type == "cuda" else group
            if node == context.ranks.node_rank:
                self.members, self.group, self._control = members, group, control
        self._own = self.members.index(context.ranks.rank)

    def gather(self, output: Any, num_samples: int) -> tuple[Any, float]:
        """Return the outputs of the node's ranks as one batch: tensors are joined along dimension 0.

        Every rank receives the same batch, in the order of ranks; a scalar becomes a vector with one element
        per rank. The backward pass sums the gradients of each sample over the ranks. Every encoder thus
        receives the full gradient of a loss that each rank computes over the complete batch. All ranks of the
        node must call this in every micro-batch, and also run the backward pass.

        Args:
            output: a tensor, or nested containers of tensors and other values, with the same structure on
                every rank. Other values are unchanged. Each tensor's first dimension is a multiple of the
                samples.
            num_samples: number of samples of this rank. With 0, `output` contains a spare sample, which is
                excluded unless no rank has samples.

        Returns:
            The batch of the node, and this rank's weight: the number of samples divided by the number of
            ranks.
        """
        leaves, structure = pytree.tree_flatten(output)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        scalar = [leaves[place].ndim == 0 for place in places]
        tensors = [leaves[place].reshape(1) if leaves[place].ndim == 0 else leaves[place] for place in places]
        held = max(1, num_samples)
        shape = f"{structure}: " + "; ".join(
            f"{tensor.dtype} scalar"
            if one
            else f"{tensor.dtype}, {_rows(len(tensor), held)}, each of shape {list(tensor.shape[1:])}"
            for tensor, one in zip(tensors, scalar, strict=True)
        )
        counts = self._agree(num_samples, shape)
        part = sum(counts) / len(counts)
        if not any(counts):
            counts = [1] * len(counts)
        sizes = [
            [min(count, 1) if one else count * (len(tensor) // held) for count in counts]
            for tensor, one in zip(tensors, scalar, strict=True)
        ]
        kept = [tensor[: size[self._own]] for tensor, size in zip(tensors, sizes, strict=True)]
        wholes = _Gather.apply(self.group, self._own, sizes, *kept) if kept else ()  # type: ignore[no-untyped-call]
        for place, whole in zip(places, wholes, strict=True):
            leaves[place] = whole
        return pytree.tree_unflatten(leaves, structure), part

    def _agree(self, num_samples: int, shape: str) -> list[int]:
        """Check that all members have the same kind of output, and return each member's number of samples."""
        digest = hashlib.blake2b(shape.encode(), digest_size=7).digest()
        own = torch.tensor([num_samples, int.from_bytes(digest, "little")])
        gathered = [torch.empty_like(own) for _ in self.members]
        dist.all_gather(gathered, own, self._control)
        if len({int(digest) for _, digest in gathered}) > 1 or "not a multiple" in shape:
            shapes = messages.gather(self._control, (num_samples, shape))
            lines = [
                f"rank {rank}, {pluralize(count, 'sample')}: {shape}"
                for rank, (count, shape) in zip(self.members, shapes, strict=True)
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
        ctx: Any,
        group: dist.ProcessGroup,
        own: int,
        sizes: Sequence[Sequence[int]],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.own, ctx.sizes = group, own, sizes
        wholes = []
        for tensor, size in zip(tensors, sizes, strict=True):
            # Collectives need equal shapes: each rank's part is padded to the longest part.
            padded = tensor.new_zeros((max(size), *tensor.shape[1:]))
            padded[: len(tensor)] = tensor
            parts = [torch.empty_like(padded) for _ in size]
            dist.all_gather(parts, padded, group)
            wholes.append(torch.cat([part[:length] for part, length in zip(parts, size, strict=True)]))
        ctx.mark_non_differentiable(*(whole for whole in wholes if not whole.is_floating_point()))
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts: list[torch.Tensor | None] = []
        for gradient, size in zip(gradients, ctx.sizes, strict=True):
            if not gradient.is_floating_point():
                parts.append(None)  # such as labels
                continue
            total = gradient.contiguous().clone()
            dist.all_reduce(total, group=ctx.group)
            start = sum(size[: ctx.own])
            parts.append(total[start : start + size[ctx.own]])
        return (None, None, None, *parts)
