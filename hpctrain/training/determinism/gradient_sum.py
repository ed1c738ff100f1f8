"""Sum of the gradients of all grains of a step, over all ranks, as integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.determinism.fixed_point import (
    largest_term,
    shared_exponent,
    start_maximum,
    to_floats,
)
from hpctrain.training.determinism.gradient_bucket import GradientBucket, SummedTensor, make_buckets
from hpctrain.training.determinism.witness import hash_numbers
from hpctrain.training.module import check_frozen

#: Elements of a gradient that is added at once, while it is in the cache. Small gradients are added together.
_LARGE = 2**14


@dataclass(frozen=True)
class SummedParameter:
    """A parameter and the tensor that has its gradient in the backward pass.

    Both are the same object, except for sharded parameters, whose computations use gathered copies.
    """

    name: str
    parameter: nn.Parameter
    computed: nn.Parameter


class GradientSum:
    """Sums gradients and changes of buffers. All ranks must call each method.

    The gradients of each backward pass are removed from the parameters, converted to integers and added. The
    last pass sends the sums in buckets, while the pass continues. Sharded parameters are reduced in every
    pass, so that each rank stores only its own rows.

    The shared exponent of a tensor is based on its largest element in the previous step. If an element is
    too large for it, `finish` returns False, and the step must be repeated, with an exponent based on the
    step itself. Exponents thus depend only on the training steps, and not on the ranks.

    If no rank has more than one grain, a few ranks send float32 gradients instead, which is half the size of
    integers. Each rank sums one slice of a bucket as integers, and sends the result. A step of at most two
    grains adds the truncated float32 gradients: their sum is rounded once, so it has the same bits.

    Attributes:
        exponents: the exponents by name; part of a checkpoint.
    """

    def __init__(
        self,
        context: DistributedContext,
        parameters: Sequence[SummedParameter],
        module: nn.Module,
        bucket_cap_mb: float | None,
        exponents: dict[str, int],
    ) -> None:
        self._context, self._module = context, module
        self._modules = list(module.named_modules())
        self._tensors = [SummedTensor(each.name, each.parameter, each.computed) for each in parameters]
        self._buffer_numbers: dict[str, int] = {}
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() or buffer.dtype in (torch.int64, torch.int32):
                self._buffer_numbers[name] = len(self._tensors)
                self._tensors.append(SummedTensor(f"buffer {name}", buffer, None))
        self.exponents = exponents
        self._parameters = dict(module.named_parameters())
        summed = {each.parameter for each in parameters}
        self._frozen = {name: each for name, each in self._parameters.items() if each not in summed}
        self._versions: list[int] = []
        self._buckets = make_buckets(self._tensors, context, bucket_cap_mb)
        #: Smallest and largest elements of the terms of this step, by the number of the tensor.
        self._extremes: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for number, each in enumerate(self._tensors):
            if each.computed is not None:
                each.computed.register_post_accumulate_grad_hook(self._hook(number))  # type: ignore[no-untyped-call]
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
        self._versions = [each._version for each in self._parameters.values()]
        for each in self._tensors:
            if each.computed is not None:
                each.computed.grad = None
        for bucket in self._buckets:
            bucket.begin(num_grains)
        self._sends_peaks = self._context.is_distributed and all(each.adds_floats for each in self._buckets)

    @contextmanager
    def grain(
        self, number: int | None, *, is_last: bool, hashes: dict[int, int] | None = None
    ) -> Iterator[None]:
        """Add the gradients of the backward pass in this block.

        Args:
            number: number of the grain; None for a pass that only matches the passes of other ranks.
            is_last: True for the last pass of the step on this rank; all ranks have the same number.
            hashes: receives the hash of each gradient, by the number of its parameter.
        """
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
            each: peak
            for each, peak in by_tensor.items()
            if 0 < peak < math.inf and peak >= largest_term(self._exponent(each), self._num_terms)
        }
        for each, peak in too_large.items():
            if each.is_count:
                raise UserError(
                    f"The {each.name} changed by {peak:g} in one step, which is too much for an exact sum. "
                    "Use smaller values, or set elastic_determinism=False."
                )
            self.exponents[each.name] = shared_exponent(peak, self._num_terms)
        if too_large:
            return False
        for bucket in self._buckets:
            bucket.wait()
        with torch.no_grad():
            for each, peak in by_tensor.items():
                self._assign(each, peak)
        for each, peak in by_tensor.items():
            if 0 < peak < math.inf and not each.is_count:
                self.exponents[each.name] = shared_exponent(peak, self._num_terms)
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

    def _exponent(self, each: SummedTensor) -> int | None:
        return 0 if each.is_count else self.exponents.get(each.name)

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
            each = self._tensors[number]
            if (exponent := self._exponent(each)) is not None:
                bucket.add(each, term, exponent)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of the module. `named_buffers` takes more time, in every pass."""
        for prefix, module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{prefix}.{name}" if prefix else name, buffer

    def _add_buffers(self) -> None:
        """Add the changes of the buffers in a pass, and undo them."""
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

    def _assign(self, each: SummedTensor, peak: float) -> None:
        exponent = self._exponent(each)
        if each.computed is None:
            self._assign_buffer(each, peak, exponent)
        elif math.isinf(peak):
            each.set_gradient(torch.full_like(each.total, math.nan, dtype=each.dtype))
        elif peak >= 0:
            is_float = each.total.is_floating_point()
            each.set_gradient(each.total if is_float else to_floats(each.total, exponent or 0, each.dtype))

    def _assign_buffer(self, each: SummedTensor, peak: float, exponent: int | None) -> None:
        name = each.name.removeprefix("buffer ")
        buffer, before = self._module.get_buffer(name), self._before[name]
        if peak <= 0:
            return
        if each.is_count:
            total = torch.div(each.total, self._num_terms, rounding_mode="floor")
            buffer.copy_(before + total.to(before.dtype))
        elif math.isinf(peak) or exponent is None:
            buffer.fill_(math.nan)
        else:
            mean = to_floats(each.total, exponent, torch.float64) / self._num_terms
            buffer.copy_(before + mean.to(before.dtype))
