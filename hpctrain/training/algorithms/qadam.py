"""Adam with 8-bit exchange of momenta after a warm-up of the variance.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021;
8 bits without error feedback as in Gan et al., "BAGUA", 2021.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpctrain.errors import UserError
from hpctrain.training.algorithms.base import Algorithm, GradBucket, completed_future, register_comm_hook
from hpctrain.training.algorithms.compression import quantized_all_reduce_mean
from hpctrain.training.optim.optimizer_setup import OptimizerSetup

if TYPE_CHECKING:
    from hpctrain.training.trainer_config import TrainerConfig


#: Bound of a momentum, in units of its deviation, for Adam's default betas.
_LARGEST = 3.0


class QAdam(Algorithm):
    """Adam with averaged gradients during the warm-up, and with averaged momenta afterwards."""

    keeps_gradients = True

    def __init__(self, warmup_steps: int = 100) -> None:
        """Freeze the variance after `warmup_steps` steps."""
        super().__init__()
        self.warmup_steps = warmup_steps
        self._step = 0

    @classmethod
    def check(cls, settings: TrainerConfig) -> None:
        super().check(settings)
        for name in ("gradient_clip_norm", "gradient_clip_value"):
            if getattr(settings, name) is not None:
                raise UserError(
                    f"{name} is {getattr(settings, name)!r}, but algorithm 'qadam' exchanges momenta, so "
                    f"there is no averaged gradient to clip. Remove {name}, or choose another algorithm."
                )
        if settings.precision == "16-mixed":
            raise UserError(
                "precision='16-mixed' does not work with algorithm='qadam': the momenta would include "
                "the loss scale. Use precision='bf16-mixed'."
            )

    def attach(self, parallel: DistributedDataParallel) -> None:
        register_comm_hook(parallel, self._exchange)

    def setup_optimizers(self, optimization: OptimizerSetup) -> None:
        super().setup_optimizers(optimization)
        self._group: dict[torch.Tensor, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}
        for optimizer in optimization.optimizers:
            plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
            if not plain or any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups):
                raise UserError(
                    "algorithm='qadam' supports only Adam and AdamW, without amsgrad or maximize, but "
                    "configure_optimizers() returned "
                    f"{type(optimizer).__name__}{' with one of these options enabled' * plain}. Change the "
                    "optimizer, or choose another algorithm."
                )
            for group in optimizer.param_groups:
                self._group |= dict.fromkeys(group["params"], (optimizer, group))
            self._replace_step(optimizer)

    def on_optimizer_step_end(self, step: int) -> None:
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._step = state.get("step", 0)

    @property
    def _is_warm(self) -> bool:
        return self._step >= self.warmup_steps

    def _exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        gradients = bucket.buffer()
        if not self._is_warm:
            gradients /= self.context.ranks.world_size
            self.all_reduce(gradients)
            return completed_future(gradients)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            optimizer, group = self._group[parameter]
            beta = group["betas"][0]
            if group["weight_decay"] and type(optimizer) is torch.optim.Adam:
                gradient.add_(parameter.detach(), alpha=group["weight_decay"])
            gradient.mul_(1 - beta).add_(optimizer.state[parameter]["exp_avg"], alpha=beta)
            # In units of the deviation: otherwise rounding would erase elements with small or zero gradients.
            # Without the clamp, elements without variance in the warm-up would use the complete range.
            gradient.div_(self._deviation(parameter)).clamp_(-_LARGEST, _LARGEST)
        mean, sent = quantized_all_reduce_mean(gradients, self.context.ranks.world_size)
        self.sent_bytes += sent
        gradients.copy_(mean)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient.mul_(self._deviation(parameter))
        return completed_future(gradients)

    def _deviation(self, parameter: torch.Tensor) -> torch.Tensor:
        optimizer, group = self._group[parameter]
        # The variance is from the warm-up, and so is its bias correction.
        settled = 1 - group["betas"][1] ** float(self.warmup_steps)
        root: torch.Tensor = (optimizer.state[parameter]["exp_avg_sq"] / settled).sqrt_()
        return root.add_(group["eps"])

    def _replace_step(self, optimizer: torch.optim.Optimizer) -> None:
        as_ever = optimizer.step

        # Keep the attributes of the original: LR schedulers mark `step` and check for the mark.
        @functools.wraps(as_ever)
        def step(*args: Any, **kwargs: Any) -> Any:
            return self._momentum_step(optimizer) if self._is_warm else as_ever(*args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]

    @torch.no_grad()
    def _momentum_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            beta = group["betas"][0]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = optimizer.state[parameter]
                state["step"] += 1
                state["exp_avg"].copy_(parameter.grad)
                if group["weight_decay"] and type(optimizer) is torch.optim.AdamW:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] / (1 - beta ** float(state["step"]))
                parameter.addcdiv_(state["exp_avg"], self._deviation(parameter), value=-float(rate))
