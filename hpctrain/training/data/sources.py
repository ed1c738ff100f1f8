"""Tells what a data set is, and how its samples are trained or validated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hpctrain.runtime.process_group import Team
from hpctrain.training.data.feed import Feed, MapFeed, Until
from hpctrain.training.data.fetch import find_fetcher
from hpctrain.training.data.loading import Loading
from hpctrain.training.data.plan import Deal
from hpctrain.training.data.randomness import SampleSeeds


def make_feed(
    dataset: Any,
    loading: Loading,
    deal: Deal,
    team: Team,
    *,
    seed: int,
    global_batch_size: int,
    until: Until,
) -> Feed:
    """The feed for a training set, which has an index or is a stream.

    Raises:
        UserError: it is empty, or can be neither.
    """
    return MapFeed(dataset, loading, deal, seed=seed, global_batch_size=global_batch_size, until=until)


class ValidationSet:
    """A data set of which every sample is seen once in a validation, however many ranks share the work."""

    def __init__(self, dataset: Any, loading: Loading, deal: Deal, seed: int, global_batch_size: int) -> None:
        """Look at the data set.

        Raises:
            UserError: it is empty, or has neither an index nor an iterator.
        """
        self._loading, self._deal = loading, deal
        self._batch_size = max(1, global_batch_size // deal.world_size)
        seeds = SampleSeeds(seed, "validation", seed_globals=loading.seed_samples)
        self._fetcher = find_fetcher(dataset, loading.collate_fn, seeds, "val_dataset")

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Yield (number of samples, batch) of this rank's part; augmentation is the same every time."""
        low, high = self._deal.part(self._fetcher.num_samples)
        starts = range(low, high, self._batch_size)
        sizes = [min(self._batch_size, high - start) for start in starts]
        orders = ((0, torch.arange(start, start + size)) for start, size in zip(starts, sizes, strict=True))
        return zip(sizes, self._loading.batches(self._fetcher, orders, "val_dataset"), strict=True)
