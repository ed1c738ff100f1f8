"""Average gradients in 16 or 8 bits, or with a low rank.

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
    """Rows of 8-bit codes, each with a minimum and a maximum."""

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
    """Return the mean of a vector over all ranks, sent at 8 bits per element."""
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


class PowerSGD(Algorithm):
    """Transfer of gradients of shape [n, m] as [n, rank] and [m, rank], by one step of a power iteration."""

    keeps_gradients = True

    def __init__(self, rank: int = 2, seed: int = 0) -> None:
        """Use `rank` columns, initially drawn from `seed`, which must be the same on all ranks."""
        super().__init__()
        self.rank, self._seed = rank, seed
        self._number: dict[torch.Tensor, int] = {}
        self._errors: dict[int, torch.Tensor] = {}
        self._columns: dict[int, torch.Tensor] = {}

    def attach(self, parallel: DistributedDataParallel) -> None:
        for number, parameter in enumerate(self.weights.parameters):
            self._number[parameter] = number
        register_comm_hook(parallel, self._exchange)

    def synchronize(self) -> None:
        self.average([self._errors[number] for number in sorted(self._errors)])

    def state_dict(self) -> dict[str, Any]:
        if not self._columns:
            return self._state
        names = sorted(self._columns)
        return {
            "errors": {str(number): self._errors[number] for number in names},
            "columns": {str(number): self._columns[number] for number in names},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, kept in (("errors", self._errors), ("columns", self._columns)):
            for number, tensor in state.get(name, {}).items():
                like = self.weights.parameters[int(number)] if self._number else tensor
                kept[int(number)] = tensor.to(like.device, copy=True)

    def _exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        matrices: list[tuple[int, torch.Tensor]] = []
        whole: list[tuple[int, torch.Tensor]] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            fits = gradient.ndim > 1 and self._is_smaller(gradient.reshape(len(gradient), -1))
            (matrices if fits else whole).append((self._number[parameter], gradient))
        if whole:
            self.average([gradient for _, gradient in whole])
        if matrices:
            self._compress(matrices)
        return completed_future(bucket.buffer())

    def _compress(self, numbered: list[tuple[int, torch.Tensor]]) -> None:
        inputs = []
        for number, gradient in numbered:
            matrix = gradient.reshape(len(gradient), -1)
            if number not in self._columns:
                self._errors[number] = torch.zeros_like(matrix)
                generator = torch.Generator().manual_seed(self._seed + number)
                first = torch.randn(matrix.shape[1], self.rank, generator=generator)
                self._columns[number] = first.to(matrix.device, matrix.dtype)
            inputs.append(matrix + self._errors[number])
        columns = [torch.linalg.qr(self._columns[number])[0] for number, _ in numbered]
        left = [matrix @ column for matrix, column in zip(inputs, columns, strict=True)]
        self.average(left)
        left = [torch.linalg.qr(rows)[0] for rows in left]
        right = [matrix.T @ rows for matrix, rows in zip(inputs, left, strict=True)]
        self.average(right)
        for (number, gradient), matrix, rows, cols in zip(numbered, inputs, left, right, strict=True):
            product = rows @ cols.T
            self._errors[number].copy_(matrix - product)
            self._columns[number] = cols
            gradient.copy_(product.view_as(gradient))

    def _is_smaller(self, matrix: torch.Tensor) -> bool:
        rows, columns = matrix.shape
        return self.rank <= min(rows, columns) and self.rank * (rows + columns) < matrix.numel()
