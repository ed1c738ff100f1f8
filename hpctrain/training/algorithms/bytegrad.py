"""Gradients in 8 bits.

Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021.
"""

from __future__ import annotations

import torch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpctrain.training.algorithms.base import Algorithm, Bucket, hook, ready
from hpctrain.training.algorithms.quantized import mean_in_bytes


class ByteGrad(Algorithm):
    """Each gradient bucket is averaged with one byte an element, between the least and the largest in it."""

    def attach(self, parallel: DistributedDataParallel) -> None:
        hook(parallel, self._exchange)

    def _exchange(self, bucket: Bucket) -> Future[torch.Tensor]:
        gradients = bucket.buffer()
        mean, sent = mean_in_bytes(gradients, self.team.ranks.world_size)
        self.sent_bytes += sent
        return ready(gradients.copy_(mean))
