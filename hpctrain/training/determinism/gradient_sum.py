"""Sum the gradients of all grains of a step, over all ranks, as integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.torch_compat import all_gather_single
from hpctrain.training.base.tensors import local_part
from hpctrain.training.determinism.fixed_point import (
    largest_term,
    scale,
    scale_in_place,
    shared_exponent,
    start_maximum,
    to_floats,
    truncate,
)
from hpctrain.training.determinism.witness import hash_numbers
from hpctrain.training.module import check_frozen

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
        self, tensors: list[SummedTensor], context: DistributedContext, group: dist.ProcessGroup | None
    ) -> None:
        self._tensors, self._context, self._is_sharded = tensors, context, tensors[0].is_sharded
        self._group = group
        self._world_size = context.ranks.world_size if self._is_sharded else 1
        self._length = 0
        for tensor in tensors:
            tensor.bucket, tensor.offset = self, self._length
            self._length += tensor.room(self._world_size)
        self.num_hooks = sum(tensor.computed is not None for tensor in tensors)
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
        #: True if each rank receives a slice of all terms, and sends its sum.
        self._exchanges_floats = False
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
            and all(tensor.computed is not None and tensor.dtype is torch.float32 for tensor in self._tensors)
        )
        self.adds_floats = self._has_one_term and num_grains <= _MAX_ADDED_FLOATS
        self._exchanges_floats = self._has_one_term and not self.adds_floats
        dtype = torch.float32 if self._has_one_term else torch.int64
        if not len(self._totals) or self._totals.dtype is not dtype:
            # Floats are divided into equal slices, one for each rank.
            length = self._length + _MAX_ADDED_FLOATS * self.num_peaks
            length = -(-length // world_size) * world_size if self._has_one_term else self._length
            self._totals, self._received = self._new(length, dtype), self._new(0, dtype)
            for tensor in self._tensors:
                tensor.total = self._totals[tensor.offset :][: math.prod(tensor.local_shape)].view(
                    tensor.local_shape
                )
        if self._is_sharded:
            self._totals.zero_()

    def begin_pass(self) -> None:
        self.wait()
        self.waiting = max(self.num_hooks, 1)

    def add(self, tensor: SummedTensor, term: torch.Tensor, exponent: int) -> None:
        """Add a term, rounded toward zero, without changing it: the backward pass may still need it."""
        is_first = tensor in self._missing
        self._missing.discard(tensor)
        if self.adds_floats:
            truncate(term, exponent, tensor.total)
            return
        if self._has_one_term:
            tensor.total.copy_(term)
            return
        scaled = term if tensor.is_count else scale(term, exponent, tensor.scaled)
        if self._is_sharded:
            terms, length = self._terms_of_pass(), tensor.room(self._world_size)
            for row, rows in enumerate(torch.split(scaled.reshape(-1), length) if length else ()):
                terms[row, tensor.offset : tensor.offset + len(rows)] += rows.to(torch.int64)
        elif is_first:
            tensor.total.copy_(scaled)
        else:
            tensor.total.add_(scaled.to(torch.int64))

    def send(self, *, is_last: bool) -> None:
        if self._is_sharded and not self._context.is_distributed:
            self._totals += self._terms_of_pass()[0]
        elif self._is_sharded:
            received = torch.empty_like(self._totals)
            terms = self._terms_of_pass().view(-1)
            work = dist.reduce_scatter_tensor(received, terms, group=self._group, async_op=True)
            self._pending.append((work, received))
        elif is_last:
            for tensor in self._missing:
                tensor.total.zero_()
            if self._exchanges_floats:
                if not len(self._received):
                    self._received = torch.empty_like(self._totals)
                work = dist.all_to_all_single(self._received, self._totals, async_op=True)
                self._pending.append((work, None))
            elif self._context.is_distributed:
                self._pending.append((dist.all_reduce(self._totals, async_op=True), None))

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
        if not self._exchanges_floats:
            return
        ranks, length = self._context.ranks, len(self._totals) // self._context.ranks.world_size
        rows = self._received.view(ranks.world_size, length)
        for tensor in self._tensors:
            low = max(tensor.offset - ranks.rank * length, 0)
            high = min(tensor.offset + tensor.numel - ranks.rank * length, length)
            exponent = exponents.get(tensor.name)
            if low < high and exponent is not None:
                summand, *summands = (scale_in_place(row[low:high], exponent) for row in rows)
                total = summand.to(torch.int64)
                for summand in summands:
                    total += summand.to(torch.int64)
                rows[ranks.rank, low:high] = to_floats(total, exponent, torch.float32)
        self._pending.append((all_gather_single(self._totals, rows[ranks.rank], async_op=True), None))

    def wait(self) -> None:
        for work, received in self._pending:
            work.wait()
            if received is not None:
                self._totals += received
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
    scaled = torch.empty(max(tensor.numel for tensor in tensors), device=context.device)
    for tensor in tensors:
        tensor.scaled = scaled[: tensor.numel].view(tensor.target.shape)
    # If not all ranks use a parameter, a bucket is sent before or after collectives of the sharded modules.
    has_shards = context.is_distributed and any(tensor.is_sharded for tensor in tensors)
    separate = dist.new_group() if has_shards else None
    buckets: list[GradientBucket] = []
    group: list[SummedTensor] = []
    length, last_kind = 0, None
    parameters = [tensor for tensor in tensors if tensor.computed is not None]
    buffers = [tensor for tensor in tensors if tensor.computed is None]
    for tensor in [*reversed(parameters), *buffers]:
        limit = int((cap_mb or (_BUCKET_MB if buckets else _FIRST_BUCKET_MB)) * 2**20) // 4
        kind = (tensor.is_sharded, tensor.computed is None)
        if group and (kind != last_kind or length + tensor.numel > limit):
            buckets.append(GradientBucket(group, context, separate))
            group, length = [], 0
        group.append(tensor)
        length, last_kind = length + tensor.numel, kind
    buckets.append(GradientBucket(group, context, separate))
    buckets[-1].num_peaks = len(tensors)
    return buckets


#: Elements of a gradient that is added at once, while it is in the cache. Small gradients are added together.
_LARGE = 2**14


class GradientSum:
    """Sums gradients and changes of buffers. All methods are collective.

    The gradients of each backward pass are removed from the parameters, converted to integers and added. The
    last pass sends the sums in buckets, while the pass continues. Sharded parameters are reduced in every
    pass, so that each rank stores only its own rows.

    The shared exponent of a tensor is based on its largest element in the previous step. If an element is
    too large for it, `finish` returns False, and the step must be repeated, with an exponent based on the
    step itself. Exponents thus depend only on the training steps, and not on the ranks.

    If no rank has more than one grain, a few ranks send float32 gradients instead, which is half the size of
    integers. Each rank sums one slice of a bucket as integers, and sends the result. A step of at most two
    grains adds the truncated float32 gradients: their sum is rounded once, so it has the same bits.

    `parameters` are those of `Strategy.summed_parameters`. The `exponents` by name are part of a checkpoint.
    """

    def __init__(
        self,
        context: DistributedContext,
        parameters: Mapping[str, tuple[nn.Parameter, nn.Parameter]],
        module: nn.Module,
        bucket_cap_mb: float | None,
        exponents: dict[str, int],
    ) -> None:
        self._context, self._module = context, module
        self._modules = list(module.named_modules())
        self._tensors = [SummedTensor(name, *tensors) for name, tensors in parameters.items()]
        self._buffer_numbers: dict[str, int] = {}
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() or buffer.dtype in (torch.int64, torch.int32):
                self._buffer_numbers[name] = len(self._tensors)
                self._tensors.append(SummedTensor(f"buffer {name}", buffer, None))
        self.exponents = exponents
        self._parameters = dict(module.named_parameters())
        summed = {parameter for parameter, _ in parameters.values()}
        self._frozen = {name: tensor for name, tensor in self._parameters.items() if tensor not in summed}
        self._versions: list[int] = []
        self._buckets = make_buckets(self._tensors, context, bucket_cap_mb)
        #: Smallest and largest elements of the terms of this step, by the number of the tensor.
        self._extremes: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for number, tensor in enumerate(self._tensors):
            if tensor.computed is not None:
                tensor.computed.register_post_accumulate_grad_hook(self._hook(number))  # type: ignore[no-untyped-call]
        self._num_terms, self._is_last = 1, True
        #: The hooks remain after the training, but must then leave gradients unchanged.
        self._is_in_pass = False
        #: Grain of the current pass; None if the pass is not used.
        self._grain: int | None = None
        #: True if the message of the last bucket contains the maxima.
        self._sends_peaks = False
        #: Tensors that have their gradient of the current pass.
        self._seen: set[int] = set()
        self._hashes: dict[int, int] | None = None
        #: Values of the buffers at the beginning of the step.
        self._before: dict[str, torch.Tensor] = {}

    def begin(self, num_grains: int) -> None:
        self._num_terms, self._extremes = num_grains, []
        self._before = {name: buffer.clone() for name, buffer in self._buffers()}
        self._versions = [tensor._version for tensor in self._parameters.values()]
        for tensor in self._tensors:
            if tensor.computed is not None:
                tensor.computed.grad = None
        for bucket in self._buckets:
            bucket.begin(num_grains)
        self._sends_peaks = self._context.is_distributed and all(
            tensor.adds_floats for tensor in self._buckets
        )

    @contextmanager
    def grain(
        self, number: int | None, *, is_last: bool, hashes: dict[int, int] | None = None
    ) -> Iterator[None]:
        self._grain, self._is_last, self._hashes = number, is_last, hashes
        self._next, self._seen = 0, set()
        for bucket in self._buckets:
            bucket.begin_pass()
        self._is_in_pass = True
        try:
            yield
        finally:
            self._is_in_pass = False
        self._add_buffers()
        for bucket in self._buckets:
            bucket.waiting = 0
            self._add_terms(bucket)
        self._send_ready()

    def finish(self) -> bool:
        """Set the gradients and buffers to the sum; return False if the step must be repeated instead."""
        self._check_parameters()
        # The messages of the buckets and of the maxima do not wait for each other.
        pending = None if self._sends_peaks else start_maximum(self._own_peaks(), self._context)
        for bucket in self._buckets:
            bucket.wait()
            bucket.send_floats(self.exponents)
        peaks = pending() if pending else self._buckets[-1].read_peaks(self._num_terms)
        by_tensor = dict(zip(self._tensors, peaks, strict=True))
        too_large = {
            tensor: peak
            for tensor, peak in by_tensor.items()
            if 0 < peak < math.inf and peak >= largest_term(self._exponent(tensor), self._num_terms)
        }
        for tensor, peak in too_large.items():
            if tensor.is_count:
                raise UserError(
                    f"The {tensor.name} changed by {peak:g} in one step, which is too much for an exact sum. "
                    "Use smaller values, or set elastic_determinism=False."
                )
            self.exponents[tensor.name] = shared_exponent(peak, self._num_terms)
        if too_large:
            return False
        for bucket in self._buckets:
            bucket.wait()
        with torch.no_grad():
            for tensor, peak in by_tensor.items():
                self._assign(tensor, peak)
        for tensor, peak in by_tensor.items():
            if 0 < peak < math.inf and not tensor.is_count:
                self.exponents[tensor.name] = shared_exponent(peak, self._num_terms)
        return True

    def _check_parameters(self) -> None:
        for (name, parameter), version in zip(self._parameters.items(), self._versions, strict=True):
            if parameter._version != version:
                raise UserError(
                    f"The training step changed the parameter {name}. With elastic_determinism, each rank "
                    "runs this step only for its own grains, so the value of the parameter would depend on "
                    "the number of ranks. Change parameters in Optimizer.register_step_post_hook, or use a "
                    "buffer."
                )
        check_frozen(self._frozen.items(), "elastic_determinism would not sum its gradient")

    def _own_peaks(self) -> torch.Tensor:
        """Return the largest absolute values of the tensors' terms on this rank; -1 without a term."""
        peaks = torch.full((len(self._tensors),), -1.0, dtype=torch.float64, device=self._context.device)
        if self._extremes:
            numbers, lows, highs = zip(*self._extremes, strict=True)
            of_terms = torch.maximum(torch.stack(highs), -torch.stack(lows)).double()
            of_terms.nan_to_num_(nan=math.inf, posinf=math.inf)
            peaks.scatter_reduce_(0, torch.tensor(numbers, device=peaks.device), of_terms, "amax")
        return peaks

    def _exponent(self, tensor: SummedTensor) -> int | None:
        return 0 if tensor.is_count else self.exponents.get(tensor.name)

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def add(computed: torch.Tensor) -> None:
            if not self._is_in_pass:
                return
            gradient, computed.grad = computed.grad, None
            if gradient is not None and (gradient.is_sparse or gradient.is_complex()):
                kind = "sparse" if gradient.is_sparse else "complex"
                raise UserError(
                    f"The gradient of {self._tensors[number].name} is {kind}, which elastic_determinism does "
                    "not support. Use dense gradients of real numbers."
                )
            if number in self._seen:
                raise UserError(
                    f"The backward pass added to the gradient of {self._tensors[number].name} twice, so "
                    "elastic_determinism cannot sum it during the pass. Use "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), and call backward() once."
                )
            if gradient is not None and self._hashes is not None:
                self._hashes[number] = hash_numbers(gradient)
            bucket = self._tensors[number].bucket
            if gradient is not None and self._grain is not None:
                bucket.terms.append((number, gradient))
            self._seen.add(number)
            bucket.waiting -= 1
            if bucket.waiting == 0 or (gradient is not None and gradient.numel() >= _LARGE):
                self._add_terms(bucket)
            if bucket.waiting == 0:
                self._send_ready()

        return add

    def _add_terms(self, bucket: GradientBucket) -> None:
        terms, bucket.terms = bucket.terms, []
        terms = [(number, term) for number, term in terms if term.numel()]
        self._extremes += [(number, *torch.aminmax(term)) for number, term in terms]
        for number, term in terms:
            tensor = self._tensors[number]
            if (exponent := self._exponent(tensor)) is not None:
                bucket.add(tensor, term, exponent)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of the module, faster than `named_buffers`."""
        for prefix, module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{prefix}.{name}" if prefix else name, buffer

    def _add_buffers(self) -> None:
        with torch.no_grad():
            for name, buffer in self._buffers():
                before, number = self._before.get(name), self._buffer_numbers.get(name)
                if before is None or before.shape != buffer.shape:
                    raise UserError(
                        f"The training step added the buffer {name} or changed its shape, so hpctrain cannot "
                        "average the buffer over the grains of a step. Register all buffers in __init__, or "
                        "set elastic_determinism=False."
                    )
                # On a GPU, this waits, so it is used only for buffers that must not change.
                if (buffer.is_cpu or number is None) and torch.equal(buffer, before):
                    continue
                unchanged = (buffer == before) | (buffer.isnan() & before.isnan())
                if number is None and unchanged.all():
                    continue
                if number is None:
                    raise UserError(
                        f"The training step changed the buffer {name} of type {buffer.dtype}, which hpctrain "
                        "cannot average over the grains of a step. Use a floating-point or int64 buffer, or "
                        "set elastic_determinism=False."
                    )
                if self._grain is not None:
                    # Infinite elements that did not change have no difference.
                    change = torch.where(unchanged, torch.zeros_like(buffer), buffer - before)
                    self._tensors[number].bucket.terms.append((number, change))
                buffer.copy_(before)

    def _send_ready(self) -> None:
        """Send full buckets in their order, which is the same on all ranks."""
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            bucket = self._buckets[self._next]
            if self._sends_peaks and self._is_last and bucket is self._buckets[-1]:
                bucket.add_peaks(self._own_peaks(), self._grain)
            bucket.send(is_last=self._is_last)
            self._next += 1

    def _assign(self, tensor: SummedTensor, peak: float) -> None:
        exponent = self._exponent(tensor)
        if tensor.computed is None:
            self._assign_buffer(tensor, peak, exponent)
        elif math.isinf(peak):
            tensor.set_gradient(torch.full_like(tensor.total, math.nan, dtype=tensor.dtype))
        elif peak >= 0:
            is_float = tensor.total.is_floating_point()
            tensor.set_gradient(
                tensor.total if is_float else to_floats(tensor.total, exponent or 0, tensor.dtype)
            )

    def _assign_buffer(self, tensor: SummedTensor, peak: float, exponent: int | None) -> None:
        name = tensor.name.removeprefix("buffer ")
        buffer, before = self._module.get_buffer(name), self._before[name]
        if peak <= 0:
            return
        if tensor.is_count:
            total = torch.div(tensor.total, self._num_terms, rounding_mode="floor")
            buffer.copy_(before + total.to(before.dtype))
        elif math.isinf(peak) or exponent is None:
            buffer.fill_(math.nan)
        else:
            mean = to_floats(tensor.total, exponent, torch.float64) / self._num_terms
            buffer.copy_(before + mean.to(before.dtype))
