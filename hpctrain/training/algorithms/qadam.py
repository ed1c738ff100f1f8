"""Adam whose momentum travels in 8 bits, once its variance has settled.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021;
in 8 bits and without error feedback as in Gan et al., "BAGUA", 2021.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpctrain.errors import UserError
from hpctrain.training.algorithms.base import Algorithm, Bucket, hook, ready
from hpctrain.training.algorithms.quantized import mean_in_bytes
from hpctrain.training.optimization import Optimization

if TYPE_CHECKING:
    from hpctrain.training.settings import Settings


#: The most that a momentum is, in units of its deviation, with the betas that Adam has by default.
_LARGEST = 3.0


class QAdam(Algorithm):
    """At first it is Adam over averaged gradients.

    Later each rank updates the momentum by its own gradient, the ranks average the momenta in 8 bits, each
    in units of its deviation, and the variance stays as it is.
    """

    def __init__(self, warmup_steps: int = 100) -> None:
        """Settle the variance for so many steps."""
        super().__init__()
        self.warmup_steps = warmup_steps
        self._step = 0

    @classmethod
    def check(cls, settings: Settings) -> None:
        for name in ("gradient_clip_norm", "gradient_clip_value"):
            if getattr(settings, name) is not None:
                raise UserError(
                    f"{name} is {getattr(settings, name)!r}, but with algorithm 'qadam' ranks exchange "
                    "momenta, and there is no common gradient to clip."
                )
        if settings.precision == "16-mixed":
            raise UserError(
                "precision '16-mixed' does not go with algorithm 'qadam', whose momenta would be scaled with "
                "the loss. Take 'bf16-mixed'."
            )

    def attach(self, parallel: DistributedDataParallel) -> None:
        hook(parallel, self._exchange)

    def optimized(self, optimization: Optimization) -> None:
        super().optimized(optimization)
        self._group: dict[torch.Tensor, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}
        for optimizer in optimization.optimizers:
            plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
            if not plain or any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups):
                raise UserError(
                    f"algorithm 'qadam' is for Adam and AdamW, without amsgrad and maximize, but "
                    f"configure_optimizers() returned {type(optimizer).__name__}."
                )
            for group in optimizer.param_groups:
                self._group |= dict.fromkeys(group["params"], (optimizer, group))
            self._replace_step(optimizer)

    def updated(self, step: int) -> None:
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._step = state.get("step", 0)

    @property
    def _is_warm(self) -> bool:
        return self._step >= self.warmup_steps

    def _exchange(self, bucket: Bucket) -> Future[torch.Tensor]:
        gradients = bucket.buffer()
        if not self._is_warm:
            gradients /= self.team.ranks.world_size
            self.all_reduce(gradients)
            return ready(gradients)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            optimizer, group = self._group[parameter]
            beta = group["betas"][0]
            if group["weight_decay"] and type(optimizer) is torch.optim.Adam:
                gradient.add_(parameter.detach(), alpha=group["weight_decay"])
            gradient.mul_(1 - beta).add_(optimizer.state[parameter]["exp_avg"], alpha=beta)
            # In units of its deviation: rounding would drown an element whose gradients are small, or zero.
            # One that the warm-up has never seen has none, and would take all of the range for itself.
            gradient.div_(self._deviation(parameter)).clamp_(-_LARGEST, _LARGEST)
        mean, sent = mean_in_bytes(gradients, self.team.ranks.world_size)
        self.sent_bytes += sent
        gradients.copy_(mean)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient.mul_(self._deviation(parameter))
        return ready(gradients)

    def _deviation(self, parameter: torch.Tensor) -> torch.Tensor:
        """The root of the settled variance, equal on all ranks."""
        optimizer, group = self._group[parameter]
        # The variance was settled in the warm-up, and so was its correction.
        settled = 1 - group["betas"][1] ** float(self.warmup_steps)
        root: torch.Tensor = (optimizer.state[parameter]["exp_avg_sq"] / settled).sqrt_()
        return root.add_(group["eps"])

    def _replace_step(self, optimizer: torch.optim.Optimizer) -> None:
        as_ever = optimizer.step

        # A schedule has put its mark on it, and looks for that.
        @functools.wraps(as_ever)
        def step(*args: Any, **kwargs: Any) -> Any:
            return self._momentum_step(optimizer) if self._is_warm else as_ever(*args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]

    @torch.no_grad()
    def _momentum_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Adam's update, from the momenta that lie where gradients otherwise do."""
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
