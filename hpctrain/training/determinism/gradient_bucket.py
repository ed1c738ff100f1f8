"""Tensors whose sums are sent together, as integers or as floats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.torch_compat import all_gather_single
from hpctrain.training.base.tensors import local_part
from hpctrain.training.determinism.fixed_point import scale, scale_in_place, to_floats, truncate

#: Default size of a bucket in megabytes of float32 gradients, as for DDP. The first bucket is smaller.
_BUCKET_MB, _FIRST_BUCKET_MB = 25.0, 1.0
#: Maximum number of ranks that exchange gradients as floats: more ranks would send many small messages.
_MAX_EXCHANGING_RANKS = 8
#: Maximum number of terms whose sum as floats is rounded once, in any order.
_MAX_ADDED_FLOATS = 2


class SummedTensor:
    """A tensor to sum: a gradient, or the changes of a buffer."""

    bucket: GradientBucket
    total: torch.Tensor
    """Sum in the shape of this rank's part: integers, or their floats."""
    scaled: torch.Tensor
    """Float32 numbers in the shape of a term, in memory that all tensors share."""

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
    """Numbers that are sent together; with sharded parameters, one row for each rank."""

    def __init__(
        self,
        tensors: list[SummedTensor],
        context: DistributedContext,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._tensors, self._context, self._is_sharded = tensors, context, tensors[0].is_sharded
        self._group = group
        self._world_size = context.ranks.world_size if self._is_sharded else 1
        self._length = 0
        for each in tensors:
            each.bucket, each.offset = self, self._length
            self._length += each.room(self._world_size)
        self.num_hooks = sum(each.computed is not None for each in tensors)
        #: Gradients that are missing in the current pass.
        self.waiting = 0
        #: Terms of the current pass that are not yet added, by the number of the tensor.
        self.terms: list[tuple[int, torch.Tensor]] = []
        #: Sums of this rank, or its only terms.
        self._totals = self._new(0)
        #: The integers of a pass, with a row for each rank. Exists only during the pass, to save memory.
        self._terms: torch.Tensor | None = None
        #: Tensors without a term in this step.
        self._missing: set[SummedTensor] = set()
        self._pending: list[tuple[Any, torch.Tensor | None]] = []
        #: True if no rank has several terms in this step, which are then not converted to integers.
        self._has_one_term = False
        #: True if there are at most two terms, which are added as floats, with the bits of a sum of integers.
        self.adds_floats = False
        #: Number of peaks that the message of this bucket has room for.
        self.num_peaks = 0
        self._received = self._totals

    def begin(self, num_grains: int) -> None:
        self.wait()
        self._missing = set(self._tensors)
        world_size = self._context.ranks.world_size
        self._has_one_term = (
            num_grains <= world_size
            and (num_grains <= _MAX_ADDED_FLOATS or world_size <= _MAX_EXCHANGING_RANKS)
            and not self._is_sharded
            and all(each.computed is not None and each.dtype is torch.float32 for each in self._tensors)
        )
        self.adds_floats = self._has_one_term and num_grains <= _MAX_ADDED_FLOATS
        dtype = torch.float32 if self._has_one_term else torch.int64
        if not len(self._totals) or self._totals.dtype is not dtype:
            # Floats are divided into equal slices, one for each rank.
            length = self._length + _MAX_ADDED_FLOATS * self.num_peaks
            length = -(-length // world_size) * world_size if self._has_one_term else self._length
            self._totals, self._received = self._new(length, dtype), self._new(0, dtype)
            for each in self._tensors:
                each.total = self._totals[each.offset :][: math.prod(each.local_shape)].view(each.local_shape)
        if self._is_sharded:
            self._totals.zero_()

    def begin_pass(self) -> None:
        self.wait()
        self.waiting = max(self.num_hooks, 1)

    def add(self, each: SummedTensor, term: torch.Tensor, exponent: int) -> None:
        """Add a term, rounded to integers, toward zero.

        The term is not changed: a gradient may share memory with tensors that the backward pass still needs.
        """
        is_first = each in self._missing
        self._missing.discard(each)
        if self.adds_floats:
            truncate(term, exponent, each.total)
            return
        if self._has_one_term:
            each.total.copy_(term)
            return
        scaled = term if each.is_count else scale(term, exponent, each.scaled)
        if self._is_sharded:
            terms, length = self._terms_of_pass(), each.room(self._world_size)
            for row, part in enumerate(torch.split(scaled.reshape(-1), length) if length else ()):
                terms[row, each.offset : each.offset + len(part)] += part.to(torch.int64)
        elif is_first:
            each.total.copy_(scaled)
        else:
            each.total.add_(scaled.to(torch.int64))

    def send(self, *, is_last: bool) -> None:
        if self._is_sharded and not self._context.is_distributed:
            self._totals += self._terms_of_pass()[0]
        elif self._is_sharded:
            own = torch.empty_like(self._totals)
            terms = self._terms_of_pass().view(-1)
            work = dist.reduce_scatter_tensor(own, terms, group=self._group, async_op=True)
            self._pending.append((work, own))
        elif is_last:
            for each in self._missing:
                each.total.zero_()
            if self._exchanges_floats:
                if not len(self._received):
                    self._received = torch.empty_like(self._totals)
                work = dist.all_to_all_single(self._received, self._totals, async_op=True)
                self._pending.append((work, None))
            elif self._context.is_distributed:
                self._pending.append((dist.all_reduce(self._totals, async_op=True), None))

    @property
    def _exchanges_floats(self) -> bool:
        """True if each rank receives a slice of all terms, and sends its sum."""
        return self._has_one_term and not self.adds_floats

    def add_peaks(self, peaks: torch.Tensor, grain: int | None) -> None:
        """Add the largest elements of a grain to the message, or nothing."""
        rows = self._rows_of_peaks()
        rows.zero_()
        if grain is not None:
            rows[grain] = peaks

    def read_peaks(self, num_grains: int) -> list[float]:
        self.wait()
        return self._rows_of_peaks()[:num_grains].amax(0).tolist()

    def _rows_of_peaks(self) -> torch.Tensor:
        shape = _MAX_ADDED_FLOATS, self.num_peaks
        return self._totals[self._length :][: math.prod(shape)].view(shape)

    def send_floats(self, exponents: Mapping[str, int]) -> None:
        """Sum the slice of this rank, and send the sums, if the ranks exchange floats."""
        if not self._exchanges_floats:
            return
        ranks, length = self._context.ranks, len(self._totals) // self._context.ranks.world_size
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
        self._pending.append((all_gather_single(self._totals, rows[ranks.rank], async_op=True), None))

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


def make_buckets(
    tensors: Sequence[SummedTensor], context: DistributedContext, cap_mb: float | None
) -> list[GradientBucket]:
    """Group the tensors in reverse order, in which backward passes produce gradients; buffers come last."""
    scaled = torch.empty(max(each.numel for each in tensors), device=context.device)
    for each in tensors:
        each.scaled = scaled[: each.numel].view(each.target.shape)
    # If not all ranks use a parameter, a bucket is sent before or after collectives of the sharded modules.
    has_shards = context.is_distributed and any(each.is_sharded for each in tensors)
    separate = dist.new_group() if has_shards else None
    buckets: list[GradientBucket] = []
    group: list[SummedTensor] = []
    length, last_kind = 0, None
    parameters = [each for each in tensors if each.computed is not None]
    buffers = [each for each in tensors if each.computed is None]
    for each in [*reversed(parameters), *buffers]:
        limit = int((cap_mb or (_BUCKET_MB if buckets else _FIRST_BUCKET_MB)) * 2**20) // 4
        kind = (each.is_sharded, each.computed is None)
        if group and (kind != last_kind or length + each.numel > limit):
            buckets.append(GradientBucket(group, context, separate))
            group, length = [], 0
        group.append(each)
        length, last_kind = length + each.numel, kind
    buckets.append(GradientBucket(group, context, separate))
    buckets[-1].num_peaks = len(tensors)
    return buckets
