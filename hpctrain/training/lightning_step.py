"""Perform optimizer steps of a LightningModule, with its hooks, and with manual optimization."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.errors import UserError
from hpctrain.training.base.metric_accumulator import MetricAccumulator
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.data.step_source import MicroBatch, StepData
from hpctrain.training.loop.train_step import TrainStep
from hpctrain.training.module import as_scalars, collect_logged, is_manual
from hpctrain.training.module_run import overrides


class LightningTrainStep(TrainStep):
    """Optimizer steps that call the hooks of a LightningModule."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._is_manual = is_manual(self._module)
        self._user_module: Any = self._module  # mypy does not know the hooks of Lightning
        self._weight, self._losses = 1.0, list[torch.Tensor]()
        self._stepped: set[torch.optim.Optimizer] = set()
        needs_epochs = overrides(self._module, "on_train_epoch_end") or any(
            schedule.is_per_epoch for schedule in self._run.schedules
        )
        if needs_epochs and self._run.source.exchanges_ends:
            raise UserError(
                f"{type(self._module).__name__} has on_train_epoch_end or a scheduler with interval='epoch', "
                "but the number of steps per epoch is unknown, because the training data is a stream. Use "
                "on_train_batch_end or interval='step' instead."
            )
        if self._is_manual:
            self._run.backward = self._backward
            for optimizer in self._optimizers:
                optimizer.register_step_post_hook(lambda stepped, *_: self._stepped.add(stepped))

    def run(self, step: StepData, micro_batches: Iterable[MicroBatch], sums: MetricAccumulator) -> None:
        with self._hooks(step.rank_batch, sums):
            super().run(step, micro_batches, sums)
            self._run.proxy.global_step = step.rank_batch.step
            self._user_module.on_train_batch_end(*self._run.step_end, step.rank_batch.batch_idx)
            self._run.step_end = ({}, None)

    def exclude_step(self, step: StepData, sums: MetricAccumulator) -> None:
        with self._hooks(step.rank_batch, sums):
            super().exclude_step(step, sums)

    @contextmanager
    def _hooks(self, rank_batch: RankBatch, sums: MetricAccumulator) -> Iterator[None]:
        run = self._run
        run.begin_step(rank_batch)
        with run.logging() as at_start:
            if rank_batch.batch_idx == 0:
                self._user_module.on_train_epoch_start()
        with run.logging(in_batch=True) as in_batch:
            yield
        run.proxy.global_step = rank_batch.step
        with run.logging() as at_end:
            if run.source.at_epoch_end:
                self._user_module.on_train_epoch_end()
                run.reset_metrics()
        per_rank = 1.0 / self._context.ranks.world_size
        share = len(rank_batch.indices) / rank_batch.batch_size
        for logged, weight in ((at_start, per_rank), (in_batch, share), (at_end, per_rank)):
            if logged:
                sums.put(as_scalars(logged, "", f"{type(self._module).__name__}.log"), weight)

    def _forward_backward(
        self, rank_batch: RankBatch, micro_batch: MicroBatch, sums: MetricAccumulator, is_last: bool
    ) -> None:
        super()._forward_backward(rank_batch, micro_batch, sums, is_last)
        self._user_module.on_after_backward()

    def _complete_gradients(
        self, optimizers: Sequence[torch.optim.Optimizer], per_token: torch.Tensor | None
    ) -> torch.Tensor | None:
        self._strategy.before_update()
        for optimizer in optimizers:
            self._user_module.on_before_optimizer_step(optimizer)
        return super()._complete_gradients(optimizers, per_token)

    def _advance(self, step: int, *, updated: bool) -> None:
        if not self._is_manual:  # otherwise, the module advances its schedules
            super()._advance(step, updated=updated)

    def _update(
        self,
        step: StepData,
        micro_batches: Iterable[MicroBatch],
        optimizers: Sequence[torch.optim.Optimizer],
        sums: MetricAccumulator,
    ) -> bool:
        if not self._is_manual:
            return super()._update(step, micro_batches, optimizers, sums)
        (micro_batch,) = micro_batches
        num_samples = micro_batch.num_samples
        share = num_samples / step.rank_batch.batch_size
        self._weight, self._losses = share * self._num_parts, []
        self._stepped.clear()
        self._strategy.sync_buffers()  # as DDP does before each forward pass
        batch = self._to_device(micro_batch.batch)
        with self._forward_context, collect_logged(self._module, num_samples) as logged:
            output, _ = self._strategy.training_step(batch, step.rank_batch.batch_idx, num_samples)
        # Gradients of other optimizers are accumulated in further steps, and saved in checkpoints.
        for optimizer in self._stepped:
            optimizer.zero_grad(set_to_none=True)
        if self._losses:
            output = {"loss": torch.stack(self._losses).sum(), **output}
        sums.add(as_scalars(output, "loss", self._origin), share)
        self._add_logged(logged, output, share, sums)
        return True

    def _backward(self, loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        """Add the mean of the gradients of all ranks, weighted by their samples."""
        self._losses.append(loss.detach())
        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        weighted: Any = loss if self._weight == 1.0 else loss * self._weight
        weighted.backward(*arguments, **options)
        if self._context.is_distributed:
            self._average_gradients(parameters)
        for parameter, earlier in zip(parameters, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad

    def _average_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        # The ranks may use different parameters.
        is_used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        dist.all_reduce(is_used, dist.ReduceOp.MAX, group=self._context.cpu_group)
        gradients = []
        for parameter, flag in zip(parameters, is_used.tolist(), strict=True):
            if flag:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        assert self._strategy.algorithm is not None
        self._strategy.algorithm.average(gradients)
