"""Scaling of the learning rate with the batch size, and its warm-up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hpctrain.training.trainer_config import TrainerConfig


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
    def of(cls, settings: TrainerConfig) -> LrScaler | None:
        """Return the scaler for the settings; None if they change no rate."""
        ratio = settings.global_batch_size / (settings.lr_reference_batch_size or settings.global_batch_size)
        scale = ratio if settings.lr_scaling == "linear" else ratio**0.5
        factor = cls(scale, settings.warmup_steps)
        return None if factor == cls() else factor

    def at(self, step: int) -> float:
        """Return the factor for `step`, counted from 1; it is constant from step `warmup_steps` on."""
        if step >= self.warmup_steps:
            return self.scale
        start = 1.0 if self.scale > 1.0 else 0.0
        return start + (self.scale - start) * step / self.warmup_steps

    @contextlib.contextmanager
    def applied(self, optimizers: Sequence[torch.optim.Optimizer], step: int) -> Iterator[None]:
        """Multiply the rates of `optimizers` within the block.

        Schedules and checkpoints see the configured rates.
        """
        factor = self.at(step)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
