"""Accumulate metrics: the contribution of a rank to the means over the global batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from hpctrain.errors import UserError

#: Output name of the training step for the number of tokens, or other units, over which the loss is a mean.
TOKENS_FIELD = "num_tokens"
#: Name of the metric that is 1 for a step without an update, because its loss is bad.
SKIPPED_FIELD = "update_skipped"


class MetricAccumulator:
    """Sums over the micro-batches of a rank."""

    def __init__(self) -> None:
        # Plain numbers on the CPU, because reading them is cheaper than adding tensors. With grains, tensors
        # of shape [grains of all ranks].
        self.values: dict[str, torch.Tensor | float] = {}
        #: Numbers of each value.
        self.width = 1
        self._names: set[str] | None = None

    def add(self, scalars: Mapping[str, torch.Tensor], share: float) -> None:
        """Add means over `share` of the global batch, or over tokens for a loss with `num_tokens`."""
        if self._names not in (None, scalars.keys()):
            raise UserError(
                f"training_step returned the metrics {sorted(scalars)} for a micro-batch, but "
                f"{sorted(self._names or ())} for the previous micro-batch. Return the same metrics for "
                "every micro-batch."
            )
        self._names = {*scalars}
        tokens = _double(scalars[TOKENS_FIELD]) if TOKENS_FIELD in scalars else None
        terms: dict[str, torch.Tensor | float] = {}
        for name, scalar in scalars.items():
            weight = share if tokens is None or name not in ("loss", TOKENS_FIELD) else 1.0
            terms[name] = _part(scalar, weight if share else 0.0)
        if tokens is not None and "loss" in terms:
            terms["loss"] = _total(terms["loss"], tokens)
        self._add(terms)

    def add_logged(self, scalars: Mapping[str, torch.Tensor], share: float) -> None:
        """Add logged means, which every micro-batch may have or not, as in `add`."""
        self._add({name: _part(scalar, share) for name, scalar in scalars.items()})

    def _add(self, terms: Mapping[str, torch.Tensor | float]) -> None:
        for name, term in terms.items():
            self.values[name] = self.values[name] + term if name in self.values else term

    def put(self, scalars: Mapping[str, torch.Tensor], share: float) -> None:
        beside = MetricAccumulator()
        beside.add(scalars, share)
        self.values |= beside.values

    def join(self, later: MetricAccumulator) -> None:
        """Merge the pass of another optimizer over the batch: add the losses, insert the other means."""
        losses = [accumulator.values["loss"] for accumulator in (self, later) if "loss" in accumulator.values]
        self.values |= later.values
        if losses:
            self.values["loss"] = sum(losses[1:], losses[0])


def _part(scalar: torch.Tensor, weight: float) -> torch.Tensor | float:
    # A rank without samples uses a sample of another rank; zeros avoid 0 · inf = nan.
    return _double(scalar) * weight if weight else 0.0 * _double(torch.zeros_like(scalar))


def _total(mean: torch.Tensor | float, tokens: torch.Tensor | float) -> torch.Tensor | float:
    """Return the sum over tokens; the mean over no tokens is NaN, but their sum is 0."""
    if isinstance(tokens, torch.Tensor):
        return torch.where(tokens > 0, mean * tokens, 0.0)
    return mean * tokens if tokens > 0 else 0.0


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum, rounded once, so that it does not depend on the order of the values."""
    terms = list(values)
    try:
        return math.fsum(terms)
    except (ValueError, OverflowError):  # infinities of both signs, or an overflow
        return sum(terms)


def _double(scalar: torch.Tensor) -> torch.Tensor | float:
    """Return the value as float64: a number from the CPU; a tensor from a GPU, to avoid a wait."""
    return scalar.item() if scalar.is_cpu else scalar.detach().double()
