"""What the ranks tell each other in every step: loss, a wish to stop, a wish to save.

The sum travels while the next step computes and is read at its end, so no step waits for it. All ranks
read the same sum at the same step, which is what makes a stop agreed: nobody asks, nobody can disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpctrain.runtime.process_group import Team


@dataclass(frozen=True)
class StepResult:
    """One step, summed over all ranks; the same value on every rank."""

    step: int
    epoch: int
    stop: bool
    """Whether any rank was told to stop."""
    save: bool
    """Whether rank 0 wants a checkpoint."""
    scalars: dict[str, float]
    """Means over the global batch; `loss` is among them."""


class StepReport:
    """A step's sum, on its way."""

    def __init__(
        self,
        team: Team,
        step: int,
        epoch: int,
        scalars: Mapping[str, torch.Tensor],
        share: float,
        *,
        stop: bool,
        save: bool,
    ) -> None:
        """Send this rank's part. All ranks must call this, with the same names in `scalars`.

        Args:
            team: the ranks that take part.
            step: the optimizer step, from 1.
            epoch: the epoch it lies in, from 0.
            scalars: means over this rank's samples, on the rank's device.
            share: this rank's samples as a fraction of the global batch.
            stop: whether this rank was told to stop.
            save: whether this rank wants a checkpoint.
        """
        self._step, self._epoch, self._names = step, epoch, list(scalars)
        flags = torch.tensor([float(stop), float(save)], dtype=torch.float64).to(
            team.device, non_blocking=True
        )
        # A rank without samples went through the motions on one that is not its own; 0 · inf would be nan.
        parts = [scalar.detach().to(team.device).double() for scalar in scalars.values()]
        values = [part * share if share else torch.zeros_like(part) for part in parts]
        self._sum = torch.cat([flags, torch.stack(values)])
        self._pending = dist.all_reduce(self._sum, async_op=True) if team.is_distributed else None

    def read(self) -> StepResult:
        """Wait for the sum, which has had a step's time to arrive."""
        if self._pending is not None:
            self._pending.wait()
        stop, save, *values = self._sum.tolist()
        return StepResult(
            self._step, self._epoch, stop > 0, save > 0, dict(zip(self._names, values, strict=True))
        )
