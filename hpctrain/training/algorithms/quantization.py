"""Quantization of vectors to 8 bits per element, with a minimum and maximum per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpctrain.training.base.torch_compat import all_gather_single

_LEVELS = 255


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of 8-bit codes, each with its own minimum and maximum.

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
    def of(cls, rows: torch.Tensor) -> QuantizedRows:
        """Round `rows`, of shape [rows, n], to the nearest of 256 levels."""
        low, high = rows.amin(1, keepdim=True).float(), rows.amax(1, keepdim=True).float()
        step = ((high - low) / _LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
        codes = ((rows.float() - low) / step).round().clamp(0, _LEVELS).to(torch.uint8)
        return cls(codes, torch.cat([low, high], 1))

    def restored(self) -> torch.Tensor:
        """Return the rows in float32, in their original shape."""
        low, high = self.ranges[:, :1], self.ranges[:, 1:]
        return low + self.codes.float() * ((high - low) / _LEVELS)


def quantized_all_reduce_mean(flat: torch.Tensor, world_size: int) -> tuple[torch.Tensor, int]:
    """Return the mean of a vector over all ranks, sent at 8 bits per element. All ranks must call this.

    Each rank receives one piece of the vector from all others, averages it, and sends the mean to all
    (ByteGrad: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021).

    Returns:
        The mean, equal on all ranks, and the number of bytes that this rank sent.
    """
    each = -(-len(flat) // world_size)
    padded = torch.nn.functional.pad(flat, (0, each * world_size - len(flat)))
    own = QuantizedRows.of(padded.view(world_size, each))
    got = QuantizedRows(torch.empty_like(own.codes), torch.empty_like(own.ranges))
    dist.all_to_all_single(got.codes, own.codes)
    dist.all_to_all_single(got.ranges, own.ranges)
    piece = QuantizedRows.of(got.restored().mean(0, keepdim=True))
    all_gather_single(got.codes, piece.codes)
    all_gather_single(got.ranges, piece.ranges)
    return got.restored().reshape(-1)[: len(flat)], own.nbytes + piece.nbytes
