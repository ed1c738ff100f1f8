"""All-reduce of gradients in 16 bits, for both transfer and sum."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpctrain.training.algorithms.base import Algorithm, GradBucket, register_comm_hook


class _Halved(Algorithm):
    dtype: ClassVar[torch.dtype]

    def attach(self, parallel: DistributedDataParallel) -> None:
        register_comm_hook(parallel, self._exchange)

    def _exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        gradients = bucket.buffer()
        # Divide before the sum, to avoid overflow.
        halved = (gradients / self.context.ranks.world_size).to(self.dtype)
        self.sent_bytes += halved.nbytes
        future = dist.all_reduce(halved, async_op=True).get_future()

        def restore(done: Future[list[torch.Tensor]]) -> torch.Tensor:
            restored: torch.Tensor = gradients.copy_(done.value()[0])
            return restored

        copied: Future[torch.Tensor] = future.then(restore)
        return copied


class Float16(_Halved):
    """All-reduce in float16, with 11 bits of precision: values above 65,504 overflow, below 6e-8 vanish."""

    dtype = torch.float16


class BFloat16(_Halved):
    """All-reduce in bfloat16, with 8 bits of precision and the range of float32."""

    dtype = torch.bfloat16
