"""Low-rank compression of gradients.

Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpctrain.training.algorithms.base import Algorithm, GradBucket, completed_future, register_comm_hook


class PowerSGD(Algorithm):
    """Transfer of gradients of shape [n, m] as [n, rank] and [m, rank], by one step of a power iteration.

    The residual is added to the next gradient (error feedback). Vectors, and matrices that compression does
    not make smaller, are averaged uncompressed. Before a checkpoint, the ranks average their residuals, which
    preserves the sum over the ranks, and thus the next mean. Residuals are stored by parameter. torch's hook
    stores them by bucket, so a checkpoint would depend on the bucket size.
    """

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
            self._average_into([gradient for _, gradient in whole])
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
        self._average_into(left)
        left = [torch.linalg.qr(rows)[0] for rows in left]
        right = [matrix.T @ rows for matrix, rows in zip(inputs, left, strict=True)]
        self._average_into(right)
        for (number, gradient), matrix, rows, cols in zip(numbered, inputs, left, right, strict=True):
            product = rows @ cols.T
            self._errors[number].copy_(matrix - product)
            self._columns[number] = cols
            gradient.copy_(product.view_as(gradient))

    def _average_into(self, tensors: list[torch.Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.all_reduce(flat)
        flat /= self.context.ranks.world_size
        self.weights.put(flat, tensors)

    def _is_smaller(self, matrix: torch.Tensor) -> bool:
        rows, columns = matrix.shape
        return self.rank <= min(rows, columns) and self.rank * (rows + columns) < matrix.numel()
