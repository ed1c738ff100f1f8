"""All-reduce of gradients in 16 or 8 bits.

ByteGrad: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpctrain.torch_compat import all_gather_single
from hpctrain.training.algorithms.base import Algorithm, GradBucket, completed_future, register_comm_hook


class _HalfPrecision(Algorithm):
    hook: ClassVar[Any]
    """A communication hook of torch; it takes a process group, or None for all ranks."""

    def attach(self, parallel: DistributedDataParallel) -> None:
        register_comm_hook(parallel, self._exchange)

    def _exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        self.sent_bytes += 2 * bucket.buffer().numel()
        exchanged: Future[torch.Tensor] = self.hook(None, bucket)
        return exchanged


class Float16(_HalfPrecision):
    """All-reduce in float16, with 11 bits of precision: values above 65,504 overflow, below 6e-8 vanish."""

    hook = staticmethod(default_hooks.fp16_compress_hook)


class BFloat16(_HalfPrecision):
    """All-reduce in bfloat16, with 8 bits of precision and the range of float32."""

    hook = staticmethod(default_hooks.bf16_compress_hook)


_LEVELS = 255


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of 8-bit codes, each with a minimum and a maximum.

    The error of an element is at most half a step: (maximum − minimum) / 510.
    """

    codes: torch.Tensor
    """uint8, of shape [rows, n]."""
    ranges: torch.Tensor
    """float32, of shape [rows, 2]: minimum and maximum."""

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.ranges.nbytes

    @classmethod
    def quantize(cls, rows: torch.Tensor) -> QuantizedRows:
        """Round `rows`, of shape [rows, n], to the nearest of 256 levels."""
        low, high = rows.amin(1, keepdim=True).float(), rows.amax(1, keepdim=True).float()
        step = ((high - low) / _LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
        codes = ((rows.float() - low) / step).round().clamp(0, _LEVELS).to(torch.uint8)
        return cls(codes, torch.cat([low, high], 1))

    def dequantize(self) -> torch.Tensor:
        """Return the rows in float32, in their original shape."""
        low, high = self.ranges[:, :1], self.ranges[:, 1:]
        return low + self.codes.float() * ((high - low) / _LEVELS)


def quantized_all_reduce_mean(flat: torch.Tensor, world_size: int) -> tuple[torch.Tensor, int]:
    """Return the mean of a vector over all ranks, sent at 8 bits per element. All ranks must call this.

    Each rank receives a piece of the vector from all others, averages it, and sends the mean to all
    (ByteGrad: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021).

    Returns:
        The mean, equal on all ranks, and the number of bytes sent by this rank.
    """
    each = -(-len(flat) // world_size)
    padded = torch.nn.functional.pad(flat, (0, each * world_size - len(flat)))
    own = QuantizedRows.quantize(padded.view(world_size, each))
    got = QuantizedRows(torch.empty_like(own.codes), torch.empty_like(own.ranges))
    dist.all_to_all_single(got.codes, own.codes)
    dist.all_to_all_single(got.ranges, own.ranges)
    piece = QuantizedRows.quantize(got.dequantize().mean(0, keepdim=True))
    all_gather_single(got.codes, piece.codes)
    all_gather_single(got.ranges, piece.ranges)
    return got.dequantize().reshape(-1)[: len(flat)], own.nbytes + piece.nbytes


class ByteGrad(Algorithm):
    """Averaging of gradient buckets at one byte per element, scaled to a bucket's minimum and maximum."""

    def attach(self, parallel: DistributedDataParallel) -> None:
        register_comm_hook(parallel, self._exchange)

    def _exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        gradients = bucket.buffer()
        mean, sent = quantized_all_reduce_mean(gradients, self.context.ranks.world_size)
        self.sent_bytes += sent
        return completed_future(gradients.copy_(mean))
