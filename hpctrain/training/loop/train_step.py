"""Perform optimizer steps: passes over a rank's share of the global batch, and the update."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.failure_file import suggest_micro_batch_size
from hpctrain.text import pluralize
from hpctrain.torch_compat import BatchNorm
from hpctrain.training.base.metric_accumulator import SKIPPED_FIELD, TOKENS_FIELD, MetricAccumulator
from hpctrain.training.base.tensors import cast_batch, forward_context, local_part
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.data.loader_config import needs_transfer, to_device
from hpctrain.training.data.step_source import MicroBatch, StepData
from hpctrain.training.loop.step_exchange import StepExchange
from hpctrain.training.module import as_scalars, collect_logged, find_run, has_step_end, takes_optimizer_idx
from hpctrain.training.optim.optimizer_setup import OptimizerSetup, parameters_of
from hpctrain.training.strategies import Strategy
from hpctrain.training.trainer_config import TrainerConfig

_NOTHING = contextlib.nullcontext()


class TrainStep:
    """Optimizer steps, performed by all ranks together. No method waits for the device."""

    #: Maximum number of samples in a micro-batch, because an earlier attempt ran out of memory.
    max_micro_batch: int | None = None
    #: Set if the updates of steps with a bad loss are to be skipped.
    loss_check: StepExchange | None = None

    def __init__(
        self, strategy: Strategy, optimization: OptimizerSetup, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._strategy, self._module, self._context = strategy, strategy.module, strategy.context
        self._settings = settings = strategy.settings
        self._scaler, self._run = scaler, find_run(self._module)
        self._optimizers, self._schedulers = optimization.optimizers, optimization.schedulers
        self._optimizers_alternate = takes_optimizer_idx(self._module)
        if self._optimizers_alternate and settings.on_bad_loss == "skip":
            raise UserError(
                "on_bad_loss is 'skip', but training_step accepts optimizer_idx: the first optimizer "
                "updates its parameters before the second loss is computed. Use 'stop' or 'rollback'."
            )
        # A pipeline runs the backward passes within the training step.
        self._runs_backward = strategy.splits_batches and strategy.context.is_distributed
        self._origin = f"{type(self._module).__name__}.training_step"
        self._forward_context = forward_context(settings.precision, self._context.device)
        self._converts_batches = needs_transfer(self._context.device) or settings.precision == "bf16-true"
        #: Parts of the batch over which the strategy averages gradients.
        self._num_parts = strategy.data_rank(self._context.ranks).world_size
        self._tokens = TokenCounter(self._context, self._num_parts)

    def run(self, step: StepData, micro_batches: Iterable[MicroBatch], sums: MetricAccumulator) -> None:
        number = step.rank_batch.step
        if self._run is not None:
            self._run.begin_step(step.rank_batch)
        updated = True
        if not self._optimizers_alternate:
            updated = self._update(step, micro_batches, self._optimizers, sums)
        else:
            # Each optimizer uses all micro-batches, after the update of the previous one.
            all_micro_batches = list(micro_batches)
            for idx, optimizer in enumerate(self._optimizers):
                with self._strategy.toggled_optimizer(idx):
                    pass_sums = MetricAccumulator()
                    self._update(step, all_micro_batches, [optimizer], pass_sums)
                sums.join(pass_sums)
        self._strategy.on_optimizer_step_end(number)
        self._advance(number, updated=updated)

    def exclude_step(self, step: StepData, sums: MetricAccumulator) -> None:
        """Complete a step without training it."""
        for _ in step.micro_batches:  # they come before those of the next step
            pass
        self._record_skipped(sums)
        self._strategy.on_optimizer_step_end(step.rank_batch.step)
        self._advance(step.rank_batch.step, updated=False)

    def _update(
        self,
        step: StepData,
        micro_batches: Iterable[MicroBatch],
        optimizers: Sequence[torch.optim.Optimizer],
        sums: MetricAccumulator,
    ) -> bool:
        """Compute gradients and update; return False if the update is skipped because of a bad loss."""
        number, check = step.rank_batch.step, self.loss_check
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()] if check else []
        per_token = self._accumulate(step, micro_batches, sums)
        if not sums.values:
            return False  # this optimizer skips the step
        accepted = check is None or check.may_update(number, sums)
        norm = self._complete_gradients(optimizers, per_token)
        if norm is not None:
            self._record_norm(sums, norm)
        if accepted and (check is None or check.accepts_norm(number, norm)):
            self._step_optimizers(optimizers, number)
            self._clear_gradients()
            return True
        self._clear_gradients()
        with torch.no_grad():
            for buffer, before in buffers:  # such as running means
                buffer.copy_(before)
        self._record_skipped(sums)
        return False

    def _record_skipped(self, sums: MetricAccumulator) -> None:
        sums.values.setdefault("loss", math.nan)
        sums.values[SKIPPED_FIELD] = 1.0 / self._context.ranks.world_size

    @property
    def micro_batch_size(self) -> int | None:
        """Maximum number of samples in a micro-batch; None for no limit."""
        if self._runs_backward:
            return None
        return min(filter(None, [self._settings.micro_batch_size, self.max_micro_batch]), default=None)

    def _to_device(self, batch: Any) -> Any:
        return cast_batch(to_device(batch, self._context.device), self._settings.precision)

    def _scalars(self, output: Any) -> dict[str, torch.Tensor]:
        scalars = as_scalars(output, "loss", self._origin)
        if "loss" not in scalars:
            raise UserError(
                f"{self._origin} returned {sorted(scalars)}, but not 'loss'. Return the loss under the name "
                "'loss'."
            )
        if not (scalars["loss"].requires_grad or self._runs_backward):
            raise UserError(
                f"{self._origin} returned a loss that does not depend on trainable parameters. Return the "
                "loss tensor without calling item() or detach(), and make sure that at least one parameter "
                "is trainable."
            )
        return scalars

    def _weighted(self, loss: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
        weighted = loss if isinstance(weight, float) and weight == 1.0 else loss * weight
        return weighted if self._scaler is None else self._scaler.scale(weighted)

    def _accumulate(
        self, step: StepData, micro_batches: Iterable[MicroBatch], sums: MetricAccumulator
    ) -> torch.Tensor | None:
        """Accumulate gradients and scalars of all micro-batches; return the factor for the gradients."""
        for number, micro_batch in enumerate(micro_batches, 1):
            # Ranks exchange gradients once per step, after the last micro-batch.
            is_last = number == step.num_micro_batches
            with _NOTHING if is_last else self._strategy.accumulating():
                self._run_micro_batch(step.rank_batch, micro_batch, sums, is_last)
        return self._tokens.factor(step.rank_batch)

    def _run_micro_batch(
        self, rank_batch: RankBatch, micro_batch: MicroBatch, sums: MetricAccumulator, is_last: bool
    ) -> None:
        """Run the passes of a micro-batch; an error for a lack of GPU memory suggests a smaller size."""
        try:
            self._forward_backward(rank_batch, micro_batch, sums, is_last)
        except torch.OutOfMemoryError as error:
            num_samples = max(micro_batch.num_samples, 1)
            remedy = (
                "Set a smaller micro_batch_size"
                if num_samples > 1
                else "Use a smaller model or smaller inputs"
            )
            error.add_note(
                f"hpctrain: This rank processed {pluralize(num_samples, 'sample')} at once "
                f"(micro_batch_size={self._settings.micro_batch_size!r}). {remedy}."
            )
            if num_samples > 1 and self._can_split_batches():
                suggest_micro_batch_size(error, -(-num_samples // 2))
            raise

    def _can_split_batches(self) -> bool:
        """Return true if smaller micro-batches yield the same gradient, up to rounding."""
        if self._runs_backward or has_step_end(self._module, "training_step"):
            return False
        return not any(isinstance(layer, BatchNorm) and layer.training for layer in self._module.modules())

    def _forward_backward(
        self, rank_batch: RankBatch, micro_batch: MicroBatch, sums: MetricAccumulator, is_last: bool
    ) -> None:
        """Add the gradient of a micro-batch, with its weight in the global batch."""
        batch = self._to_device(micro_batch.batch) if self._converts_batches else micro_batch.batch
        rank_samples = micro_batch.num_samples
        with self._forward_context, collect_logged(self._module, rank_samples) as logged:
            output, num_samples = self._strategy.training_step(batch, rank_batch.batch_idx, rank_samples)
        if output is None and self._optimizers_alternate:
            return
        scalars = self._scalars(output)
        if logged:
            self._add_logged(logged, scalars, rank_samples / rank_batch.batch_size, sums)
        share = num_samples / rank_batch.batch_size
        # The strategy averages over the ranks that share the batch; the mean over the batch is needed.
        weight: float | torch.Tensor = share * self._num_parts
        if TOKENS_FIELD in scalars:
            if not self._strategy.counts_tokens:
                raise UserError(
                    f"training_step returned {TOKENS_FIELD!r}, but strategy {self._settings.strategy!r} "
                    "averages the loss over samples, not tokens. Remove this output, or choose another "
                    "strategy."
                )
            count = scalars[TOKENS_FIELD] if num_samples else 0 * scalars[TOKENS_FIELD]
            weight = self._tokens.add(count, rank_batch, is_last)
        sums.add(scalars, share)
        if is_last and self.loss_check is not None:
            self.loss_check.send_loss(sums)
        self._strategy.backward(self._weighted(scalars["loss"], weight))

    def _add_logged(
        self, logged: dict[str, Any], returned: Iterable[str], share: float, sums: MetricAccumulator
    ) -> None:
        values = {name: value for name, value in logged.items() if name not in returned}
        sums.add_logged(as_scalars(values, "", f"{type(self._module).__name__}.log"), share)

    def _record_norm(self, sums: MetricAccumulator, norm: torch.Tensor) -> None:
        # Every rank has the full norm, and the values of the ranks are summed.
        share = norm.detach().double() / self._context.ranks.world_size
        sums.values.setdefault("grad_norm", share.item() if share.device.type == "cpu" else share)

    def _complete_gradients(
        self, optimizers: Sequence[torch.optim.Optimizer], per_token: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Complete and clip the gradients of `optimizers`; return their norm if they are clipped by norm."""
        self._strategy.before_update()
        clip_norm, clip_value = self._settings.gradient_clip_norm, self._settings.gradient_clip_value
        if per_token is None and clip_norm is None and clip_value is None:
            return None
        # Clipping thresholds refer to unscaled gradients.
        if self._scaler is not None:
            for optimizer in optimizers:
                self._scaler.unscale_(optimizer)
        parameters = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        if per_token is not None:
            _multiply(gradients, per_token)
        norm = None
        if clip_norm is not None:
            norm = self._gradient_norm(parameters)
            _multiply(gradients, (clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if clip_value is not None and gradients:
            torch._foreach_clamp_min_(gradients, -clip_value)
            torch._foreach_clamp_max_(gradients, clip_value)
        return norm

    def _gradient_norm(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._strategy.gradient_norm(parameters)

    def _step_optimizers(self, optimizers: Sequence[torch.optim.Optimizer], step: int) -> None:
        """Update the parameters; schedules and checkpoints see the configured learning rates."""
        factor = lr_factor(self._settings, step)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups if factor != 1.0]
        rates = [group["lr"] for group in groups]
        try:
            for group in groups:
                group["lr"] = group["lr"] * factor
            for optimizer in optimizers:
                if self._scaler is None:
                    optimizer.step()
                else:
                    self._scaler.step(optimizer)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _clear_gradients(self) -> None:
        for optimizer in self._optimizers:
            if (
                "zero_grad" in vars(optimizer)
                or type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad
            ):
                optimizer.zero_grad(set_to_none=True)
                continue
            # Optimizer.zero_grad without its record for the profiler, which takes 20 µs.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _advance(self, step: int, *, updated: bool) -> None:
        """Advance the schedules, and after an update the float16 loss scale, at the end of `step`."""
        # A restarted process may not have scaled a loss yet.
        if self._scaler is not None and (updated or self._scaler._scale is not None):
            # Without an update, the scale remains, but gradients may have been unscaled.
            self._scaler.update(None if updated else self._scaler.get_scale())
        if not self._schedulers:
            return
        # Schedules also count steps without an update.
        with warnings.catch_warnings() if self._scaler and step == 1 else _NOTHING:
            if self._scaler and step == 1:  # the optimizer may skip its first step because of float16
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step.* before .*optimizer.step")
            for scheduler in self._schedulers:
                scheduler.step()


class TokenCounter:
    """Weights of losses that are means over tokens, whose global number is known only at the end."""

    def __init__(self, context: DistributedContext, world_size: int) -> None:
        self._context, self._world_size = context, world_size
        self._total: torch.Tensor | None = None
        self._pending: Any = None

    def add(self, count: torch.Tensor, rank_batch: RankBatch, is_last: bool) -> torch.Tensor:
        count = count.detach().to(self._context.device, torch.float32)
        self._total = count.clone() if self._total is None else self._total + count
        if is_last and self._context.is_distributed:
            self._pending = dist.all_reduce(self._total, async_op=True)
        return count * (self._world_size / rank_batch.batch_size)

    def factor(self, rank_batch: RankBatch) -> torch.Tensor | None:
        """Return the final factor for the step's gradients; None if losses are means over samples."""
        if self._total is None:
            return None
        if self._pending is not None:
            self._pending.wait()
        factor = rank_batch.batch_size / self._total.clamp(min=1.0)
        self._total = self._pending = None
        return factor


def lr_factor(settings: TrainerConfig, step: int) -> float:
    """Return the factor for the learning rates of `step`, counted from 1, independent of any schedule.

    The rates are scaled with the batch size ("linear": Goyal et al., "Accurate, Large Minibatch SGD", 2017)
    or its square root ("sqrt": Krizhevsky, "One weird trick", 2014; for Adam: Malladi et al., "On the SDEs
    and Scaling Rules for Adaptive Gradient Algorithms", 2022). The warm-up is linear. It starts at the
    configured rate, or at zero if the rate is not scaled up.
    """
    ratio = settings.global_batch_size / (settings.lr_reference_batch_size or settings.global_batch_size)
    scale = ratio if settings.lr_scaling == "linear" else ratio**0.5
    if step >= settings.warmup_steps:
        return scale
    start = 1.0 if scale > 1.0 else 0.0
    return start + (scale - start) * step / settings.warmup_steps


def _multiply(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
