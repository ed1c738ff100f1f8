"""Gradients that are sent in 16 bits, and added up in them."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpctrain.training.algorithms.base import Algorithm, Bucket, hook


class _Halved(Algorithm):
    dtype: ClassVar[torch.dtype]

    def attach(self, parallel: DistributedDataParallel) -> None:
        hook(parallel, self._exchange)

    def _exchange(self, bucket: Bucket) -> Future[torch.Tensor]:
        gradients = bucket.buffer()
        # Divided first, so that no sum leaves the range.
        halved = (gradients / self.team.ranks.world_size).to(self.dtype)
        self.sent_bytes += halved.nbytes
        future = dist.all_reduce(halved, async_op=True).get_future()

        def restore(done: Future[list[torch.Tensor]]) -> torch.Tensor:
            restored: torch.Tensor = gradients.copy_(done.value()[0])
            return restored

        copied: Future[torch.Tensor] = future.then(restore)
        return copied


class Float16(_Halved):
    """In float16: 11 bits of precision. Gradients above 65,504 overflow, those below 6e-8 vanish."""

    dtype = torch.float16


class BFloat16(_Halved):
    """In bfloat16: 8 bits of precision, and the range of float32."""

    dtype = torch.bfloat16
