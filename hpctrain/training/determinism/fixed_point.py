"""Fixed-point numbers with a shared exponent, whose sums do not depend on order or grouping.

A tensor x with |x| < 2^e becomes the int64 tensor trunc(x · 2^s) with s = 62 - e - headroom - log2(terms).
The sum of all terms cannot overflow, and integer addition is associative. The error of a term is below 2^-s,
which is 2^-52 · 2^e with 10 bits of headroom for one term, and 2^-42 · 2^e for 1,024 terms. A sum of float32
numbers has errors of 2^-24 · 2^e. See Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Transactions
on Computers 64 (7), 2015, which splits floats on a shared grid in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.base.tensors import is_sharded, local_part

#: Bits of an int64 without its sign, and one bit of margin.
_BITS = 62
#: Growth of the largest element, in bits, that an exponent from the previous step tolerates.
HEADROOM = 10
#: Powers of two up to this exponent are float32 numbers.
_FLOAT32_EXPONENT = 126
_ZERO = torch.zeros(())


def shared_exponent(peak: float, num_terms: int) -> int:
    """Return the s of a sum of `num_terms` tensors, based on the largest absolute value of an element."""
    return _BITS - HEADROOM - (num_terms - 1).bit_length() - math.frexp(peak)[1]


def largest_term(exponent: int | None, num_terms: int) -> float:
    """Return the bound for absolute values: terms below it cannot overflow."""
    if exponent is None:
        return 0.0
    return math.ldexp(1.0, min(_BITS - (num_terms - 1).bit_length() - exponent, 1023))


def to_floats(total: torch.Tensor, exponent: int, dtype: torch.dtype) -> torch.Tensor:
    """Return total · 2^-exponent, rounded to nearest; a float32 result is rounded only once."""
    floats = total.to(torch.float64 if dtype is torch.float64 else torch.float32)
    return scale_in_place(floats, -exponent).to(dtype)


def scale(x: torch.Tensor, exponent: int, buffer: torch.Tensor | None = None) -> torch.Tensor:
    """Return x · 2^exponent, without rounding unless the result is subnormal."""
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    if abs(exponent) <= _FLOAT32_EXPONENT:
        if buffer is not None and x.dtype is torch.float32:
            return torch.mul(x, 2.0**exponent, out=buffer)
        return x * 2.0**exponent
    half = exponent // 2
    return (x.double() * 2.0**half) * 2.0 ** (exponent - half)


def scale_in_place(x: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return x · 2^exponent like `scale`; may change x."""
    if x.dtype not in (torch.float32, torch.float64) or abs(exponent) > _FLOAT32_EXPONENT:
        return scale(x, exponent)
    return x.mul_(2.0**exponent)


def truncate(x: torch.Tensor, exponent: int, out: torch.Tensor) -> torch.Tensor:
    """Write float32 numbers, converted to integers and back, to `out`, which may be `x`."""
    if not 0 <= exponent <= _FLOAT32_EXPONENT:  # products with small powers are not exact
        return out.copy_(to_floats(scale(x, exponent).to(torch.int64), exponent, torch.float32))
    unit = 2.0**-exponent
    # The addition also turns -0.0 into 0.0.
    return torch.add(_ZERO, torch.div(x, unit, rounding_mode="trunc", out=out), alpha=unit, out=out)


def largest_absolute(x: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of an element, 0 for an empty tensor; NaN if an element is NaN."""
    if not x.numel():
        return x.new_zeros(())
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low)


def start_maximum(peaks: torch.Tensor, context: DistributedContext) -> Callable[[], list[float]]:
    """Collective. Start the maximum over all ranks, infinity for NaN; return a function that waits."""
    peaks.nan_to_num_(nan=math.inf, posinf=math.inf)
    work = dist.all_reduce(peaks, op=dist.ReduceOp.MAX, async_op=True) if context.is_distributed else None

    def read() -> list[float]:
        if work is not None:
            work.wait()
        return peaks.tolist()

    return read


def exact_norm(parameters: Iterable[torch.Tensor], context: DistributedContext) -> torch.Tensor:
    """Collective. Return the Euclidean norm of all gradients together, with the same bits for any sharding.

    The squares of a tensor are summed as pairs of integers: multiples of a unit, and the remainders as
    multiples of a smaller unit. For n float32 elements, the error of the sum of squares is below n^3 · 2^-118
    times the largest square.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), device=context.device)
    local_gradients = [local_part(gradient) for gradient in gradients]
    sharded = torch.tensor([is_sharded(gradient) for gradient in gradients], device=context.device)
    local_peaks = [largest_absolute(local).to(context.device, torch.float64) for local in local_gradients]
    largest = start_maximum(torch.stack(local_peaks), context)()
    if not all(map(math.isfinite, largest)):
        return torch.tensor(math.nan, device=context.device)
    sums = torch.zeros((len(local_gradients), 2), dtype=torch.int64, device=context.device)
    units = []
    for number, (gradient, local, peak) in enumerate(zip(gradients, local_gradients, largest, strict=True)):
        bits = _BITS - (gradient.numel() - 1).bit_length() if gradient.numel() else _BITS
        exponent = bits // 2 - math.frexp(peak)[1]
        units.append((exponent, bits - 1))
        if peak and local.numel():
            squares = scale(local, exponent).double().square_()
            multiples = squares.floor()
            sums[number, 0] = multiples.to(torch.int64).sum()
            sums[number, 1] = squares.sub_(multiples).mul_(2.0 ** (bits - 1)).to(torch.int64).sum()
    if context.is_distributed and bool(sharded.any()):
        rows = sums * sharded[:, None]
        dist.all_reduce(rows)
        sums = torch.where(sharded[:, None], rows, sums)
    # Squares of float64 numbers may overflow, so all are divided by that of a number of the largest size.
    common = min((unit[0] for unit, peak in zip(units, largest, strict=True) if peak), default=0)
    terms = [
        math.ldexp(total, shift)
        for (high, low), (exponent, bits) in zip(sums.tolist(), units, strict=True)
        for total, shift in ((high, 2 * (common - exponent)), (low, 2 * (common - exponent) - bits))
    ]
    dtype = torch.float64 if any(local.dtype is torch.float64 for local in local_gradients) else torch.float32
    norm = math.sqrt(math.fsum(terms)) * 2.0**-common
    return torch.tensor(norm, dtype=dtype, device=context.device)
