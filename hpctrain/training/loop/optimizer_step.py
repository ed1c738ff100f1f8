"""Parameter update from complete gradients: clipping, optimizers, learning rates, schedules."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hpctrain.training.base.dtensor_parts import local_part
from hpctrain.training.optim.optimizer_setup import OptimizerSetup, parameters_of
from hpctrain.training.strategies import Strategy
from hpctrain.training.trainer_config import TrainerConfig

_NOTHING = contextlib.nullcontext()


class OptimizerStep:
    """Steps of optimizers and schedules. No method here waits for the device."""

    def __init__(
        self,
        optimization: OptimizerSetup,
        strategy: Strategy,
        settings: TrainerConfig,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._optimization, self._strategy, self._scaler = optimization, strategy, scaler
        self._clip_norm, self._clip_value = settings.gradient_clip_norm, settings.gradient_clip_value
        self._lr_scaler = LrScaler.from_settings(settings)
        #: Function that returns the norm of the gradients of parameters, equal on all ranks.
        self.gradient_norm: Callable[[Sequence[torch.Tensor]], torch.Tensor] = strategy.gradient_norm

    def complete_gradients(
        self, optimizers: Sequence[torch.optim.Optimizer], per_token: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Complete and clip the gradients of `optimizers`. All ranks must call this.

        Args:
            optimizers: optimizers with complete gradients.
            per_token: factor for the gradients before clipping, if the loss is a mean over tokens.

        Returns:
            The norm of the gradients before clipping by norm; None if they are not clipped by norm.
        """
        self._strategy.before_update()
        if per_token is not None or self._clip_norm is not None or self._clip_value is not None:
            return self._change(optimizers, per_token)
        return None

    def update(self, optimizers: Sequence[torch.optim.Optimizer], step: int) -> None:
        """Update the parameters of `optimizers`, then clear all gradients. All ranks must call this.

        Args:
            optimizers: those whose gradients are complete.
            step: the optimizer step, from 1.
        """
        with self._lr_scaler.apply(optimizers, step) if self._lr_scaler else _NOTHING:
            for optimizer in optimizers:
                if self._scaler is None:
                    optimizer.step()
                else:
                    self._scaler.step(optimizer)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Clear all gradients."""
        for optimizer in self._optimization.optimizers:
            self._strategy.zero_grad(optimizer)

    def advance(self, step: int, *, updated: bool = True) -> None:
        """Advance the schedules, and after an update the float16 loss scale, at the end of `step`."""
        # A restarted process may not have scaled a loss yet.
        if self._scaler is not None and (updated or self._scaler._scale is not None):
            # Without an update, the scale remains, but gradients may have been unscaled.
            self._scaler.update(None if updated else self._scaler.get_scale())
        if not self._optimization.schedulers:
            return
        # Schedules also count steps without an update.
        with _suppress_order_warning() if self._scaler and step == 1 else contextlib.nullcontext():
            for scheduler in self._optimization.schedulers:
                scheduler.step()

    def _change(
        self, optimizers: Sequence[torch.optim.Optimizer], per_token: torch.Tensor | None
    ) -> torch.Tensor | None:
        # Clipping thresholds refer to unscaled gradients.
        if self._scaler is not None:
            for optimizer in optimizers:
                self._scaler.unscale_(optimizer)
        parameters = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        if per_token is not None:
            _multiply(gradients, per_token)
        norm = None
        if self._clip_norm is not None:
            norm = self.gradient_norm(parameters)
            _multiply(gradients, (self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if self._clip_value is not None and gradients:
            torch._foreach_clamp_min_(gradients, -self._clip_value)
            torch._foreach_clamp_max_(gradients, self._clip_value)
        return norm


@dataclass(frozen=True)
class LrScaler:
    """Factor for all learning rates; a pure function of the step, independent of any schedule.

    `scale` is the ratio of the batch sizes ("linear": Goyal et al., "Accurate, Large Minibatch SGD", 2017) or
    its square root ("sqrt": Krizhevsky, "One weird trick", 2014; for Adam: Malladi et al., "On the SDEs and
    Scaling Rules for Adaptive Gradient Algorithms", 2022). The warm-up is linear. It starts at the configured
    rate, or at zero if the rate is not scaled up.
    """

    scale: float = 1.0
    warmup_steps: int = 0

    @classmethod
    def from_settings(cls, settings: TrainerConfig) -> LrScaler | None:
        """Return the scaler for the settings; None if the rates are unchanged."""
        ratio = settings.global_batch_size / (settings.lr_reference_batch_size or settings.global_batch_size)
        scale = ratio if settings.lr_scaling == "linear" else ratio**0.5
        lr_scaler = cls(scale, settings.warmup_steps)
        return None if lr_scaler == cls() else lr_scaler

    def factor(self, step: int) -> float:
        """Return the factor for `step`, counted from 1; it is constant from step `warmup_steps` on."""
        if step >= self.warmup_steps:
            return self.scale
        start = 1.0 if self.scale > 1.0 else 0.0
        return start + (self.scale - start) * step / self.warmup_steps

    @contextlib.contextmanager
    def apply(self, optimizers: Sequence[torch.optim.Optimizer], step: int) -> Iterator[None]:
        """Multiply the rates of `optimizers` within the block.

        Schedules and checkpoints see the configured rates.
        """
        factor = self.factor(step)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def _multiply(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))


@contextlib.contextmanager
def _suppress_order_warning() -> Iterator[None]:
    """Suppress PyTorch's warning about a schedule that steps before its optimizer.

    The warning appears if the optimizer skips its first step because of float16.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.* before .*optimizer.step")
        yield
