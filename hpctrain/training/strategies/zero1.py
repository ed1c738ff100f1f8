"""ZeRO stage 1: replicas of the module, of whose parameters each rank's optimizer updates a part.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import init_device_mesh

from hpctrain.training.optimization import Optimization
from hpctrain.training.strategies.parts import Parts, gradient_norm
from hpctrain.training.strategies.replicas import Replicas


class ZeRO1(Replicas):
    """As ddp, but what the optimizer keeps is cut over the ranks.

    Gradients are averaged as with ddp. Each rank updates its rows of every parameter, and then the ranks
    exchange the rows. An optimizer that computes element by element gives the very bits that ddp gives.
    """

    def optimized(self, optimization: Optimization) -> Optimization:
        self._parts: Parts | None = None
        if self.team.is_distributed:
            ranks, device = self.team.ranks, self.team.device
            parts = self._parts = Parts(init_device_mesh(device.type, (ranks.world_size,)))
            for optimizer in optimization.optimizers:
                parts.put_into(optimizer, self.before_update)
                optimizer.register_step_post_hook(lambda updated, *_: parts.gather(updated))
        return optimization

    def before_update(self) -> None:
        if self._parts is not None:
            self._parts.give_gradients()

    def gradient_norm(self, parameters: Iterable[torch.Tensor], p: float = 2.0) -> torch.Tensor:
        if self._parts is None:
            return super().gradient_norm(parameters, p)
        return gradient_norm(parameters, self.team.device, p)
