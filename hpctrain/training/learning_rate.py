"""A learning rate found for one batch size, used with another, and approached slowly at the start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hpctrain.training.settings import Settings


@dataclass(frozen=True)
class RateFactor:
    """What learning rates are multiplied by: a pure function of the step, beside any schedule.

    `scale` is the ratio of the batch sizes ("linear": Goyal et al., "Accurate, Large Minibatch SGD", 2017) or
    its square root ("sqrt": Krizhevsky, "One weird trick", 2014; for Adam: Malladi et al., "On the SDEs and
    Scaling Rules for Adaptive Gradient Algorithms", 2022). The warm-up goes from the rate that was set, or
    from zero where it is not scaled up, in equal steps.
    """

    scale: float = 1.0
    warmup_steps: int = 0

    @classmethod
    def of(cls, settings: Settings) -> RateFactor | None:
        """What the settings ask for; None where they ask for nothing."""
        ratio = settings.global_batch_size / (settings.lr_batch_size or settings.global_batch_size)
        scale = ratio if settings.lr_scaling == "linear" else ratio**0.5
        factor = cls(scale, settings.warmup_steps)
        return None if factor == cls() else factor

    def at(self, step: int) -> float:
        """The factor in `step`, counted from 1; the full one from step `warmup_steps` on."""
        if step >= self.warmup_steps:
            return self.scale
        start = 1.0 if self.scale > 1.0 else 0.0
        return start + (self.scale - start) * step / self.warmup_steps

    @contextlib.contextmanager
    def applied(self, optimizers: Sequence[torch.optim.Optimizer], step: int) -> Iterator[None]:
        """Multiply the rates of `optimizers` for the block: schedules and checkpoints see what was set."""
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
