"""ZeRO stage 1: replicas of the module; each rank's optimizer updates a part of the parameters.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import init_device_mesh

from hpctrain.torch_compat import register_first_post_hook
from hpctrain.training.optim.optimizer_setup import OptimizerSetup
from hpctrain.training.strategies.ddp import DataParallelBase
from hpctrain.training.strategies.sharded_params import ShardedParameters, gradient_norm


class ZeRO1(DataParallelBase):
    """Variant of ddp with optimizer state sharded over the ranks.

    Gradients are averaged as with ddp. Each rank updates its rows of every parameter, then the ranks exchange
    the rows. With an element-wise optimizer, the result is bitwise equal to that of ddp.
    """

    has_complete_state = False

    def wrap_optimizers(self, optimization: OptimizerSetup) -> OptimizerSetup:
        self._parts: ShardedParameters | None = None
        if self.context.is_distributed:
            ranks, device = self.context.ranks, self.context.device
            mesh = init_device_mesh(device.type, (ranks.world_size,))
            parts = self._parts = ShardedParameters(mesh)
            for optimizer in optimization.optimizers:
                parts.shard_optimizer(optimizer, self.before_update)
                # The script's own hooks then use the complete parameters.
                register_first_post_hook(optimizer, lambda updated, *_: parts.gather(updated))
        return optimization

    def before_update(self) -> None:
        if self._parts is not None:
            self._parts.assign_gradients()

    def gradient_norm(self, parameters: Iterable[torch.Tensor], p: float = 2.0) -> torch.Tensor:
        if self._parts is None:
            return super().gradient_norm(parameters, p)
        return gradient_norm(parameters, self.context.device, p)
