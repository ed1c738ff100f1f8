"""One optimizer step: forward and backward passes over a rank's share of the global batch, and the update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.errors import UserError
from hpctrain.runtime.process_group import Team
from hpctrain.training.data.feed import MicroBatch, Step
from hpctrain.training.data.loading import moves_batches, to_device
from hpctrain.training.data.plan import Share
from hpctrain.training.micro_batches import out_of_memory_advice
from hpctrain.training.module import as_scalars, takes_optimizer_idx
from hpctrain.training.optimization import Optimization
from hpctrain.training.precision import batch_in_precision, changes_batches, forward_context
from hpctrain.training.settings import Settings
from hpctrain.training.strategies import Strategy
from hpctrain.training.sums import TOKENS, ScalarSums
from hpctrain.training.updates import Updates

_NOTHING = contextlib.nullcontext()


class Stepping:
    """Takes optimizer steps. All ranks take each of them together."""

    def __init__(
        self,
        strategy: Strategy,
        optimization: Optimization,
        settings: Settings,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        """Look at what the module's training step takes.

        Raises:
            UserError: it is to optimize by itself.
        """
        self._strategy, self._module, self._team = strategy, strategy.module, strategy.team
        self._settings, self._scaler = settings, scaler
        self._optimizers = optimization.optimizers
        self._updates = Updates(optimization, strategy, settings, scaler)
        self._each_alone = takes_optimizer_idx(self._module)
        # A pipeline goes through its backward passes in the training step.
        self._has_gone_back = strategy.splits_itself and strategy.team.is_distributed
        self._origin = f"{type(self._module).__name__}.training_step"
        self._world_size = strategy.deal(self._team.ranks).world_size
        self._forward_context = forward_context(settings.precision, self._team.device)
        self._changes_batches = moves_batches(self._team.device) or changes_batches(settings.precision)
        self._tokens = _Tokens(self._team, self._world_size)

    def take(self, step: Step, micro_batches: Iterable[MicroBatch], sums: ScalarSums) -> None:
        """Train one step.

        Args:
            step: what to train.
            micro_batches: those of the step.
            sums: gets this rank's part of the means over the global batch.

        Raises:
            UserError: the training step returned something else than a loss.
        """
        number = step.share.step
        if not self._each_alone:
            per_token = self._accumulate(step, micro_batches, sums)
            self._note_norm(sums, self._updates.update(self._optimizers, number, per_token))
        else:
            # Every optimizer goes through all of them, after the one before has made its update.
            kept = list(micro_batches)
            for idx, optimizer in enumerate(self._optimizers):
                with self._strategy.turn_of(idx):
                    own = ScalarSums()
                    per_token = self._accumulate(step, kept, own)
                    if own.values:
                        self._note_norm(own, self._updates.update([optimizer], number, per_token))
                sums.join(own)
        self._strategy.updated(number)
        self._updates.advance(number)

    def scalars(self, output: Any) -> dict[str, torch.Tensor]:
        """What a training step returned, checked.

        Raises:
            UserError: it is no loss, or none is in it.
        """
        scalars = as_scalars(output, "loss", self._origin)
        if "loss" not in scalars:
            raise UserError(f"{self._origin} returned {sorted(scalars)}; 'loss' is missing among them.")
        if not (scalars["loss"].requires_grad or self._has_gone_back):
            raise UserError(
                f"{self._origin} returned a loss that depends on no parameter which takes a gradient. Return "
                "it as it was computed, without item() or detach(), and leave something to be trained."
            )
        return scalars

    def weighted(self, loss: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
        """The loss as it goes into the backward pass."""
        weighted = loss if isinstance(weight, float) and weight == 1.0 else loss * weight
        return weighted if self._scaler is None else self._scaler.scale(weighted)

    def _accumulate(
        self, step: Step, micro_batches: Iterable[MicroBatch], sums: ScalarSums
    ) -> torch.Tensor | None:
        """Add up gradients and scalars of all micro-batches; what the gradients have to be multiplied by."""
        for number, micro_batch in enumerate(micro_batches, 1):
            # Ranks exchange gradients once a step, after the last micro-batch.
            last = number == step.num_micro_batches
            with _NOTHING if last else self._strategy.accumulating():
                try:
                    self._forward_backward(step.share, micro_batch, sums, last)
                except torch.OutOfMemoryError as error:
                    num_samples = max(micro_batch.num_samples, 1)
                    out_of_memory_advice(error, self._settings.micro_batch_size, num_samples)
                    raise
        return self._tokens.factor(step.share)

    def _forward_backward(self, share: Share, micro_batch: MicroBatch, sums: ScalarSums, last: bool) -> None:
        """Add the gradient of a micro-batch, at its weight in the global batch."""
        batch = micro_batch.batch
        if self._changes_batches:
            batch = batch_in_precision(to_device(batch, self._team.device), self._settings.precision)
        with self._forward_context:
            output, num_samples = self._strategy.training_step(
                batch, share.batch_idx, micro_batch.num_samples
            )
        if output is None and self._each_alone:
            return
        scalars = self.scalars(output)
        part = num_samples / share.batch_size
        # The strategy takes the mean over those that share the batch; it is to be the mean over the batch.
        weight: float | torch.Tensor = part * self._world_size
        if TOKENS in scalars:
            weight = self._tokens.add(scalars[TOKENS] if num_samples else 0 * scalars[TOKENS], share, last)
        self._strategy.backward(self.weighted(scalars["loss"], weight))
        sums.add(scalars, part)

    def _note_norm(self, sums: ScalarSums, norm: torch.Tensor | None) -> None:
        if norm is not None:
            # Every rank has all of it, and what they have is added up.
            part = norm.detach().double() / self._team.ranks.world_size
            sums.values.setdefault("grad_norm", part.item() if part.device.type == "cpu" else part)


class _Tokens:
    """Counts what the losses of a step are means over.

    How many tokens the global batch has shows only when every rank has gone through its part. Until then a
    loss gets the weight that it would have with one token a sample; what gradients are multiplied by in the
    end makes up for it.
    """

    def __init__(self, team: Team, world_size: int) -> None:
        self._team, self._world_size = team, world_size
        self._total: torch.Tensor | None = None
        self._pending: Any = None

    def add(self, count: torch.Tensor, share: Share, last: bool) -> torch.Tensor:
        """Count the tokens of a micro-batch, and return the weight of its loss meanwhile."""
        count = count.detach().to(self._team.device, torch.float32)
        self._total = count.clone() if self._total is None else self._total + count
        if last and self._team.is_distributed:
            self._pending = dist.all_reduce(self._total, async_op=True)
        return count * (self._world_size / share.batch_size)

    def factor(self, share: Share) -> torch.Tensor | None:
        """What the step's gradients have to be multiplied by; None where losses are means over samples."""
        if self._total is None:
            return None
        if self._pending is not None:
            self._pending.wait()
        factor = share.batch_size / self._total.clamp(min=1.0)
        self._total = self._pending = None
        return factor
