"""All-reduce of gradients in 8 bits.

Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021.
"""

from __future__ import annotations

import torch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpctrain.training.algorithms.base import Algorithm, GradBucket, completed_future, register_comm_hook
from hpctrain.training.algorithms.quantization import quantized_all_reduce_mean


class ByteGrad(Algorithm):
    """Averaging of gradient buckets at one byte per element, scaled to a bucket's minimum and maximum."""

    def attach(self, parallel: DistributedDataParallel) -> None:
        register_comm_hook(parallel, self._exchange)

    def _exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        gradients = bucket.buffer()
        mean, sent = quantized_all_reduce_mean(gradients, self.context.ranks.world_size)
        self.sent_bytes += sent
        return completed_future(gradients.copy_(mean))
