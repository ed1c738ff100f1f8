"""Mix data sets in proportions that may depend on the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from hpctrain.errors import UserError
from hpctrain.training.base.rng import derive_seed
from hpctrain.training.data.sample_order import SampleOrder, mix_bits

#: Number of steps that are drawn together.
_BLOCK = 64


class Mixture(ConcatDataset[Any]):
    """Several map-style data sets, of which each step trains on given proportions.

    Each data set has its own random order. When all its samples are used, it starts over in another order.
    An epoch has as many samples as all data sets together. Validation uses each sample once.
    """

    def __init__(
        self, datasets: Iterable[Dataset[Any]], weights: Sequence[float] | Callable[[int], Sequence[float]]
    ) -> None:
        """Concatenate the data sets.

        Args:
            datasets: map-style data sets.
            weights: the proportion of each data set, which need not sum to 1; or a function that returns the
                proportions for a step, counted from 1. For a step, it must always return the same values.

        Raises:
            UserError: a data set is empty; a proportion is missing or negative, or all are 0.
        """
        super().__init__(datasets)
        for number, dataset in enumerate(self.datasets):
            if not len(dataset):  # type: ignore[arg-type]
                raise UserError(f"Data set {number} of the Mixture is empty. Remove this data set.")
        self._weights = weights
        self.shares(1)

    def shares(self, step: int) -> list[float]:
        """Return the proportions in a step, scaled to sum to 1.

        Raises:
            UserError: a proportion is missing or negative, or all are 0.
        """
        weights = [float(w) for w in (self._weights(step) if callable(self._weights) else self._weights)]
        total = sum(weights)
        if len(weights) != len(self.datasets) or min(weights) < 0 or not 0 < total < math.inf:
            raise UserError(
                f"The Mixture has {len(self.datasets)} data sets, but its weights in step {step} are "
                f"{weights}. Set one finite, non-negative weight per data set. At least one weight must be "
                "above 0."
            )
        return [weight / total for weight in weights]


def contains_mixture(dataset: Any) -> bool:
    """Return true if a Subset or ConcatDataset contains a mixture, whose weights would have no effect."""
    datasets = dataset.datasets if isinstance(dataset, ConcatDataset) else []
    datasets = [dataset.dataset] if isinstance(dataset, Subset) else datasets
    return any(isinstance(inner, Mixture) or contains_mixture(inner) for inner in datasets)


class MixtureOrder(SampleOrder):
    repeats = True

    def __init__(self, mixture: Mixture, batch_size: int, seed: int) -> None:
        super().__init__(-(-len(mixture) // batch_size) * batch_size, seed)
        self._mixture, self._batch_size = mixture, batch_size
        self._sizes = [len(dataset) for dataset in mixture.datasets]  # type: ignore[arg-type]
        self._orders = [
            SampleOrder(size, derive_seed(seed, "mixture", i)) for i, size in enumerate(self._sizes)
        ]
        self._key = derive_seed(seed, "mixture") - (1 << 62)
        #: Used samples of each data set, and the planned number, before each block.
        self._before: list[tuple[list[int], list[float]]] = [
            ([0] * len(self._sizes), [0.0] * len(self._sizes))
        ]
        self._cached_block: tuple[int, torch.Tensor] = (-1, torch.empty(0, dtype=torch.int64))

    def identity(self) -> dict[str, Any]:
        return {"seed": self.seed, "mixture": self._sizes, "weights": self._mixture.shares(1)}

    def indices(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        step, low = divmod(epoch * self.num_samples + start, self._batch_size)
        block, row = divmod(step, _BLOCK)
        if block != self._cached_block[0]:
            while block >= len(self._before):
                self._before.append(self._divide(len(self._before) - 1)[1])
            self._cached_block = (block, self._draw(block))
        return self._cached_block[1][row][low : low + stop - start]

    def _divide(self, block: int) -> tuple[list[list[int]], tuple[list[int], list[float]]]:
        taken, planned = self._before[block]
        planned = [*planned]
        counts: list[list[int]] = []
        for step in range(block * _BLOCK + 1, (block + 1) * _BLOCK + 1):
            shares = self._mixture.shares(step)
            for i, share in enumerate(shares):
                # A data set that is no longer used does not receive a rest later.
                planned[i] = planned[i] + share * self._batch_size if share else float(taken[i])
            due = [max(0.0, plan - used) for plan, used in zip(planned, taken, strict=True)]
            if not (total := sum(due)):
                due, total = shares, 1.0
            due = [amount * self._batch_size / total for amount in due]
            count = [int(amount) for amount in due]
            by_rest = sorted(range(len(due)), key=lambda i: due[i] - count[i], reverse=True)
            for i in by_rest[: self._batch_size - sum(count)]:
                count[i] += 1
            taken = [used + added for used, added in zip(taken, count, strict=True)]
            counts.append(count)
        return counts, (taken, planned)

    def _draw(self, block: int) -> torch.Tensor:
        """Return the samples of a block, of shape [steps, batch size], in random order within each step."""
        counts, totals = self._divide(block)
        if len(self._before) == block + 1:  # the next block starts with these totals
            self._before.append(totals)
        before, after = self._before[block][0], totals[0]
        numbers = torch.arange(len(self._sizes)).repeat(_BLOCK)
        of_dataset = numbers.repeat_interleave(torch.tensor(counts).flatten()).reshape(_BLOCK, -1)
        samples = torch.empty_like(of_dataset)
        offset = 0
        for i, size in enumerate(self._sizes):
            samples[of_dataset == i] = self._take(i, before[i], after[i]) + offset
            offset += size
        positions = torch.arange(samples.numel()).reshape(samples.shape) + block * samples.numel()
        return samples.gather(1, mix_bits(positions, self._key).argsort(1))

    def _take(self, dataset: int, start: int, stop: int) -> torch.Tensor:
        """Return the samples of a data set from the `start`-th until the `stop`-th use."""
        size = self._sizes[dataset]
        pieces = [torch.empty(0, dtype=torch.int64)]
        for number in range(start // size, -(-stop // size)):
            low, high = max(start - number * size, 0), min(stop - number * size, size)
            pieces.append(self._orders[dataset].indices(number, low, high))
        return torch.cat(pieces)
