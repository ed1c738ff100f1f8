"""Tells what a data set is, and how its samples are trained or validated."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, default_collate

from hpctrain.errors import UserError
from hpctrain.runtime.process_group import Team
from hpctrain.training.data.feed import Feed, MapFeed, Until
from hpctrain.training.data.fetch import find_fetcher
from hpctrain.training.data.lanes import Lanes
from hpctrain.training.data.loading import Loading, pinned
from hpctrain.training.data.plan import Deal
from hpctrain.training.data.randomness import SampleSeeds
from hpctrain.training.data.shard_reading import ShardedStream, is_stream
from hpctrain.training.data.stream_feed import StreamFeed


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
    """The feed for a training set, which has an index or is a stream. All ranks must call this.

    Raises:
        UserError: it is empty, or can be neither; or the ranks do not have the same.
    """
    _refuse_loader(dataset, "train_dataset")
    feed: Feed
    if is_stream(dataset):
        if deal.world_size != team.ranks.world_size:
            raise UserError(
                "train_dataset is a stream, which the ranks read in parts, and with this strategy every rank "
                "needs all of each batch. Give a data set with len() and an index."
            )
        feed = StreamFeed(
            dataset, loading, deal, team, seed=seed, global_batch_size=global_batch_size, until=until
        )
    else:
        feed = MapFeed(dataset, loading, deal, seed=seed, global_batch_size=global_batch_size, until=until)
    end = {"max_steps": until.steps, "max_epochs": until.epochs}
    _check_equal(team, {**feed.identity(), **end}, "train_dataset")
    return feed


def _refuse_loader(dataset: Any, name: str) -> None:
    """Its batches would be taken for samples.

    Raises:
        UserError: it is one.
    """
    if isinstance(dataset, DataLoader):
        raise UserError(
            f"{name} is a DataLoader. Give the {type(dataset.dataset).__name__} that it loads from, and set "
            "global_batch_size, num_workers and collate_fn here: which rank trains what follows from a step."
        )


def _check_equal(team: Team, own: dict[str, Any], name: str) -> None:
    """See that all ranks have the same data: each works out alone what the others train.

    Raises:
        UserError: on all ranks alike: they have not.
    """
    first, *others = team.gather(own)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise UserError(
                f"{name} is {first} on rank 0, but {other} on rank {rank}. All ranks of a run need the same: "
                "see that their nodes have the same copy of the data, and the same settings."
            )


class ValidationSet(Protocol):
    """Samples each of which is seen once in a validation, however many ranks share the work."""

    def identity(self) -> dict[str, Any]:
        """What has to be equal on all ranks."""

    def batches(self) -> Generator[tuple[int, Any], None, None]:
        """Yield (number of samples, batch) of this rank's part; augmentation is the same every time."""


def make_validation_set(
    dataset: Any,
    loading: Loading,
    deal: Deal,
    team: Team,
    *,
    seed: int,
    global_batch_size: int,
    name: str = "val_dataset",
) -> ValidationSet:
    """The way to go through a validation set, which has an index or is a stream. All ranks must call this.

    Raises:
        UserError: it is empty, or can be neither; or the ranks do not have the same.
    """
    _refuse_loader(dataset, name)
    seeds = SampleSeeds(seed, "validation", seed_globals=loading.seed_samples)
    batch_size = deal.largest(global_batch_size)
    make = _ValidationStream if is_stream(dataset) else _ValidationMap
    data: ValidationSet = make(dataset, loading, deal, seeds, batch_size, name)
    _check_equal(team, data.identity(), name)
    return data


class _ValidationMap:
    """From a data set with an index each rank takes a range."""

    def __init__(
        self, dataset: Any, loading: Loading, deal: Deal, seeds: SampleSeeds, batch_size: int, name: str
    ) -> None:
        self._loading, self._deal, self._batch_size, self._name = loading, deal, batch_size, name
        self._fetcher = find_fetcher(dataset, loading.collate_fn, seeds, name)

    def identity(self) -> dict[str, Any]:
        return {"num_samples": self._fetcher.num_samples}

    def batches(self) -> Generator[tuple[int, Any], None, None]:
        low, high = self._deal.part(self._fetcher.num_samples)
        starts = range(low, high, self._batch_size)
        sizes = [min(self._batch_size, high - start) for start in starts]
        orders = ((0, torch.arange(start, start + size)) for start, size in zip(starts, sizes, strict=True))
        with closing(self._loading.batches(self._fetcher, orders, self._name)) as batches:
            yield from zip(sizes, batches, strict=True)


class _ValidationStream:
    """From a stream each rank takes the shards that it would train; a shard that ranks share, in turns."""

    def __init__(
        self, dataset: Any, loading: Loading, deal: Deal, seeds: SampleSeeds, batch_size: int, name: str
    ) -> None:
        self._stream = ShardedStream(dataset, name)
        self._loading, self._deal, self._seeds, self._batch_size = loading, deal, seeds, batch_size

    def identity(self) -> dict[str, Any]:
        return {"num_shards": self._stream.num_shards}

    def batches(self) -> Generator[tuple[int, Any], None, None]:
        lanes = Lanes(
            self._stream,
            self._loading,
            self._deal,
            self._seeds,
            chunk_size=self._batch_size,
            num_epochs=1,
        )
        waiting: list[Any] = []
        with closing(lanes):
            for chunk in lanes.all_chunks():
                waiting += chunk.samples.values()
                while len(waiting) >= self._batch_size:
                    yield self._batch_size, self._batch(waiting[: self._batch_size])
                    del waiting[: self._batch_size]
        if waiting:
            yield len(waiting), self._batch(waiting)

    def _batch(self, samples: list[Any]) -> Any:
        batch = (self._loading.collate_fn or default_collate)(samples)
        return pinned(batch) if self._loading.pin_memory else batch
