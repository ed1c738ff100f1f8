"""DDP2: one process per device, but one batch per node; gradients are averaged across nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.module import Module, has_step_end
from hpctrain.training.strategies.ddp import DataParallelBase
from hpctrain.training.strategies.dp import run_on_devices
from hpctrain.training.strategies.node_gather import NodeGather

if TYPE_CHECKING:
    from hpctrain.training.trainer_config import TrainerConfig


class DDP2(DataParallelBase):
    """Strategy in which `training_step_end` receives the outputs of all ranks of a node as one batch.

    Each of the node's k ranks computes the same loss over this batch. The backward pass of the gather adds k
    times the gradient for every encoder. For parameters after the gather, each rank has the gradient once.
    The loss is weighted by 1/k of the node's samples. In both cases, the mean over all ranks is then the mean
    over the nodes' batches.

    A rank with several devices splits its samples among them, as `dp` does. With one rank per node, nothing
    is gathered from other processes.
    """

    gathers_samples = uses_all_devices = True

    def __init__(self, module: Module, context: DistributedContext, settings: TrainerConfig) -> None:
        """Find the ranks of this node, and broadcast rank 0's parameters. All ranks must call this."""
        self._node = NodeGather(context) if context.is_distributed else None
        # With elastic determinism, each grain is such a batch, and a single rank computes it.
        gathers = self._node is not None and not settings.elastic_determinism
        steps = ("training_step", "validation_step", "test_step")
        self._gathering = [step for step in steps if gathers and has_step_end(module, step)]
        super().__init__(module, context, settings)

    @property
    def in_lockstep(self) -> bool:  # type: ignore[override]
        return self._gathering not in ([], ["training_step"])

    @property
    def counts_tokens(self) -> bool:
        return "training_step" not in self._gathering

    def join(self, output: Any, num_samples: int) -> tuple[Any, float]:
        # Without `training_step_end`, the loss is computed per rank, so nothing is gathered.
        return self._gather("training_step", output, num_samples)

    def evaluation_step(self, method: str, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        output = getattr(self.module, method)(batch, batch_idx)
        output, counted = self._gather(method, output, num_samples)
        return self.end_evaluation_step(method, output), counted

    def _gather(self, step: str, output: Any, num_samples: int) -> tuple[Any, float]:
        if step not in self._gathering:
            return output, num_samples
        assert self._node is not None
        if len(self._node.members) == 1 and len(self.context.devices) > 1:
            return output, num_samples
        return self._node.gather(output, num_samples)

    def _run_module(
        self, batch: Any, batch_idx: int, num_samples: int, turn: tuple[int, ...]
    ) -> tuple[Any, float]:
        devices, arguments = self.context.devices, (batch_idx, *turn)
        if len(devices) == 1 or self.settings.elastic_determinism:
            return super()._run_module(batch, batch_idx, num_samples, turn)
        output = run_on_devices(self.module, "training_step", batch, arguments, num_samples, devices)
        joined, counted = self.join(output, num_samples)
        return self.module.training_step_end(joined), counted
