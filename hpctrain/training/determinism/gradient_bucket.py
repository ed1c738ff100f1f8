"""Tensors whose sums are sent together, as integers or as floats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.torch_compat import all_gather_single
from hpctrain.training.base.dtensor_parts import local_part
from hpctrain.training.determinism.fixed_point import scale_in_place, to_floats, truncate

#: Default size of a bucket in megabytes of float32 gradients, as for DDP. The first bucket is smaller.
_BUCKET_MB, _FIRST_BUCKET_MB = 25.0, 1.0
#: Maximum number of ranks that exchange gradients as floats: more ranks would send many small messages.
_MAX_EXCHANGING_RANKS = 8


class SummedTensor:
    """A tensor to sum: a gradient, or the changes of a buffer."""

    bucket: GradientBucket
    total: torch.Tensor
    """Sum of this rank's part, as integers."""

    def __init__(self, name: str, target: torch.Tensor, computed: nn.Parameter | None) -> None:
        self.name, self.target, self.computed = name, target, computed
        self.dtype = target.dtype
        self.is_count = not target.is_floating_point()
        self.offset = 0
        self.is_sharded = isinstance(target, DTensor)
        self.local_shape = local_part(target).shape
        self.numel = target.numel()

    def room(self, world_size: int) -> int:
        """Return the elements of the tensor in a bucket: those of the rank with the most rows, if sharded."""
        if not self.is_sharded:
            return self.numel
        rows = self.target.shape[0]
        return -(-rows // world_size) * (self.numel // max(rows, 1))

    def set_gradient(self, gradient: torch.Tensor) -> None:
        target = self.target
        if isinstance(target, DTensor):
            gradient = DTensor.from_local(
                gradient,
                target.device_mesh,
                target.placements,
                run_check=False,
                shape=target.shape,
                stride=target.stride(),
            )
        target.grad = gradient


class GradientBucket:
    """Integers that are sent together; with sharded parameters, one row for each rank."""

    def __init__(self, tensors: list[SummedTensor], context: DistributedContext) -> None:
        self._tensors, self._context, self._is_sharded = tensors, context, tensors[0].is_sharded
        self._world_size = context.ranks.world_size if self._is_sharded else 1
        self._length = 0
        for each in tensors:
            each.bucket, each.offset = self, self._length
            self._length += each.room(self._world_size)
        self.num_hooks = sum(each.computed is not None for each in tensors)
        #: Gradients that are missing in the current pass.
        self.waiting = 0
        self._totals = self._new(0)
        #: The integers of a pass, with a row for each rank. Exists only during the pass, to save memory.
        self._terms: torch.Tensor | None = None
        #: Tensors without a term in this step.
        self._missing: set[SummedTensor] = set()
        self._pending: list[tuple[Any, torch.Tensor | None]] = []
        #: True if no rank has several terms in this step. A single rank stores them, the others send floats.
        self._has_one_term = False
        self._own_terms: dict[SummedTensor, torch.Tensor] = {}
        self._floats = self._received = self._new(0, torch.float32)

    def begin(self, num_grains: int) -> None:
        self.wait()
        self._missing = set(self._tensors)
        world_size = self._context.ranks.world_size
        self._own_terms = {}
        self._has_one_term = (
            num_grains <= world_size <= _MAX_EXCHANGING_RANKS
            and not self._is_sharded
            and all(each.computed is not None and each.dtype is torch.float32 for each in self._tensors)
        )
        # Only one kind of buffers exists at a time, to save memory.
        if not self._has_one_term and not len(self._totals):
            self._floats = self._received = self._new(0, torch.float32)
            self._totals = self._new(self._length)
            for each in self._tensors:
                each.total = self._totals[each.offset :][: math.prod(each.local_shape)].view(each.local_shape)
        elif self._has_one_term and world_size > 1 and not len(self._floats):
            self._floats = self._new(-(-self._length // world_size) * world_size, torch.float32)
            self._received = torch.empty_like(self._floats)
            self._totals = self._new(0)
            for each in self._tensors:
                each.total = self._totals
        if self._is_sharded:
            self._totals.zero_()

    def begin_pass(self) -> None:
        self.wait()
        self.waiting = max(self.num_hooks, 1)

    def add(self, each: SummedTensor, term: torch.Tensor, exponent: int) -> None:
        """Add a term, rounded to integers, toward zero. The term may be changed."""
        if self._has_one_term:
            self._missing.remove(each)
            if self._context.is_distributed:
                self._floats[each.offset : each.offset + each.numel].copy_(term.reshape(-1))
            else:
                self._own_terms[each] = truncate(term, exponent)
            return
        scaled = term if each.is_count else scale_in_place(term, exponent)
        if self._is_sharded:
            terms, length = self._terms_of_pass(), each.room(self._world_size)
            for row, part in enumerate(torch.split(scaled.reshape(-1), length) if length else ()):
                terms[row, each.offset : each.offset + len(part)] += part.to(torch.int64)
        elif each in self._missing:
            self._missing.remove(each)
            each.total.copy_(scaled)
        else:
            each.total.add_(scaled.to(torch.int64))

    def send(self, *, is_last: bool) -> None:
        if self._is_sharded and not self._context.is_distributed:
            self._totals += self._terms_of_pass()[0]
        elif self._is_sharded:
            own = torch.empty_like(self._totals)
            work = dist.reduce_scatter_tensor(own, self._terms_of_pass().view(-1), async_op=True)
            self._pending.append((work, own))
        elif is_last:
            summands = self._floats if self._has_one_term else self._totals
            for each in self._missing:
                summands[each.offset : each.offset + each.numel].zero_()
            if self._context.is_distributed and self._has_one_term:
                work = dist.all_to_all_single(self._received, self._floats, async_op=True)
                self._pending.append((work, None))
            elif self._context.is_distributed:
                self._pending.append((dist.all_reduce(self._totals, async_op=True), None))

    def send_floats(self, exponents: Mapping[str, int]) -> None:
        """Sum the slice of this rank, and send the sums, if the terms were sent as floats."""
        if not self._has_one_term or not self._context.is_distributed:
            return
        ranks, length = self._context.ranks, len(self._floats) // self._context.ranks.world_size
        rows = self._received.view(ranks.world_size, length)
        for each in self._tensors:
            low = max(each.offset - ranks.rank * length, 0)
            high = min(each.offset + each.numel - ranks.rank * length, length)
            exponent = exponents.get(each.name)
            if low < high and exponent is not None:
                first, *others = (scale_in_place(row[low:high], exponent) for row in rows)
                total = first.to(torch.int64)
                for other in others:
                    total += other.to(torch.int64)
                rows[ranks.rank, low:high] = to_floats(total, exponent, torch.float32)
        self._pending.append((all_gather_single(self._floats, rows[ranks.rank], async_op=True), None))

    def wait(self) -> None:
        for work, own in self._pending:
            work.wait()
            if own is not None:
                self._totals += own
        self._pending, self._terms = [], None

    def _new(self, length: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype, device=self._context.device)

    def _terms_of_pass(self) -> torch.Tensor:
        if self._terms is None:
            self._terms = self._totals.new_zeros((self._world_size, self._length))
        return self._terms

    def totals(self) -> Iterator[tuple[SummedTensor, torch.Tensor]]:
        """Yield each tensor with its sum, in the shape of this rank's part: integers, or their floats."""
        for each in self._tensors:
            if not self._has_one_term:
                yield each, each.total
            elif self._context.is_distributed:
                yield each, self._floats[each.offset : each.offset + each.numel].view(each.local_shape)
            else:
                term = self._own_terms.get(each)
                yield each, self._floats.new_zeros(each.local_shape) if term is None else term


def make_buckets(
    tensors: Sequence[SummedTensor], context: DistributedContext, cap_mb: float | None
) -> list[GradientBucket]:
    """Group the tensors in reverse order, in which backward passes produce gradients; buffers come last."""
    buckets: list[GradientBucket] = []
    group: list[SummedTensor] = []
    length, last_kind = 0, None
    parameters = [each for each in tensors if each.computed is not None]
    buffers = [each for each in tensors if each.computed is None]
    for each in [*reversed(parameters), *buffers]:
        limit = int((cap_mb or (_BUCKET_MB if buckets else _FIRST_BUCKET_MB)) * 2**20) // 4
        kind = (each.is_sharded, each.computed is None)
        if group and (kind != last_kind or length + each.numel > limit):
            buckets.append(GradientBucket(group, context))
            group, length = [], 0
        group.append(each)
        length, last_kind = length + each.numel, kind
    return [*buckets, GradientBucket(group, context)] if group else buckets
