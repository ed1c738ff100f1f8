"""Norm of gradients that does not depend on their sharding."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.base.dtensor_parts import is_sharded, local_part
from hpctrain.training.determinism.fixed_point import largest_absolute, scale, start_maximum

_BITS = 62


def exact_norm(parameters: Iterable[torch.Tensor], context: DistributedContext) -> torch.Tensor:
    """Return the Euclidean norm of all gradients together, with the same bits for any sharding.

    The squares of a tensor are summed as pairs of integers: multiples of a unit, and the remainders as
    multiples of a smaller unit. For n float32 elements, the error of the sum of squares is below n^3 · 2^-118
    times the largest square. All ranks must call this.

    Args:
        parameters: parameters of the optimizers, complete or sharded; the same order on all ranks.
        context: the ranks.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), device=context.device)
    parts = [local_part(each) for each in gradients]
    sharded = torch.tensor([is_sharded(each) for each in gradients], device=context.device)
    own_peaks = [largest_absolute(part).to(context.device, torch.float64) for part in parts]
    largest = start_maximum(torch.stack(own_peaks), context)()
    if not all(map(math.isfinite, largest)):
        return torch.tensor(math.nan, device=context.device)
    sums = torch.zeros((len(parts), 2), dtype=torch.int64, device=context.device)
    units = []
    for number, (whole, part, peak) in enumerate(zip(gradients, parts, largest, strict=True)):
        bits = _BITS - (whole.numel() - 1).bit_length() if whole.numel() else _BITS
        exponent = bits // 2 - math.frexp(peak)[1]
        units.append((exponent, bits - 1))
        if peak and part.numel():
            squares = scale(part, exponent).double().square_()
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
    dtype = torch.float64 if any(part.dtype is torch.float64 for part in parts) else torch.float32
    norm = math.sqrt(math.fsum(terms)) * 2.0**-common
    return torch.tensor(norm, dtype=dtype, device=context.device)
