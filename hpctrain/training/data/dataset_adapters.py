"""Adapt data sets of any kind to training and validation."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.fetcher import BatchOrder, make_fetcher
from hpctrain.training.data.loader_config import DataLoaderParts, LoaderConfig, unpack_dataloader
from hpctrain.training.data.loader_workers import load_batches
from hpctrain.training.data.sampler_plan import DrawnEpoch, SamplerPlan
from hpctrain.training.data.shard_readers import ShardedStream, ShardReaders, is_stream
from hpctrain.training.data.step_source import MapStepSource, StepSource, StopCondition
from hpctrain.training.data.stream_step_source import StreamStepSource


def make_step_source(
    dataset: Any,
    loading: LoaderConfig,
    data_rank: DataRank,
    context: DistributedContext,
    until: StopCondition,
    strategy: str = "auto",
) -> StepSource:
    """Collective."""
    name = "train_dataset"
    loader_parts, unpacked = unpack_dataloader(dataset, loading, name)
    source: StepSource
    if _is_stream(loader_parts, data_rank, name):
        if data_rank.world_size != context.ranks.world_size:
            raise UserError(
                "train_dataset is a stream, which hpctrain divides among the ranks, but "
                f"strategy={strategy!r} needs the complete batch on every rank. Use a map-style data set, "
                "with __len__ and __getitem__."
            )
        source = StreamStepSource(loader_parts.dataset, unpacked, data_rank, context, until)
    else:
        source = MapStepSource(loader_parts, unpacked, data_rank, until)
    end = {"max_steps": until.steps, "max_epochs": until.epochs}
    _check_equal(context, {**source.identity(), **end}, name)
    if isinstance(dataset, DataLoader) and data_rank.world_size > 1 and not loading.global_batch_size_is_set:
        size, ranks = source.loading.global_batch_size, data_rank.world_size
        message = f"Each batch of the DataLoader is divided among all {ranks} ranks"
        if not loader_parts.yields_batches:
            message += (
                f", so a step trains on {size} samples in total. If batch_size={size} is meant for each "
                f"rank, as in Lightning and DDP, set Trainer(global_batch_size={size * ranks})"
            )
        source.remarks = [*source.remarks, f"{message}."]
    return source


def _is_stream(loader_parts: DataLoaderParts, data_rank: DataRank, name: str) -> bool:
    is_a_stream = is_stream(loader_parts.dataset)
    if is_a_stream and data_rank.grain_size is not None:
        raise UserError(
            f"{name} is a stream, which elastic_determinism does not support: its samples are divided among "
            "the ranks by shard, not by grain. Use a map-style data set, with __len__ and __getitem__."
        )
    return is_a_stream


def _check_equal(context: DistributedContext, identity: dict[str, Any], name: str) -> None:
    of_main, *of_ranks = context.all_gather(identity)
    for rank, of_rank in enumerate(of_ranks, 1):
        if of_rank != of_main:
            differing = [
                key for key in of_main.keys() | of_rank.keys() if of_main.get(key) != of_rank.get(key)
            ]
            on_first, on_other = (
                {key: values.get(key) for key in sorted(differing)} for values in (of_main, of_rank)
            )
            raise UserError(
                f"{name} differs between ranks: {on_first} on rank 0, but {on_other} on rank {rank}. "
                "Check that all nodes have the same data and the same settings. A custom sampler must "
                "return the samples of all ranks, not only those of its own rank."
            )


def make_validation_set(
    dataset: Any,
    loading: LoaderConfig,
    data_rank: DataRank,
    context: DistributedContext,
    name: str = "val_dataset",
) -> ValidationSet:
    """Collective."""
    loading = replace(loading, global_batch_size_is_set=False, accumulate_grad_batches=1)
    loader_parts, loading = unpack_dataloader(dataset, loading, name)
    make = _ValidationStream if _is_stream(loader_parts, data_rank, name) else _ValidationMap
    data: ValidationSet = make(loader_parts, loading, data_rank, name)
    _check_equal(context, data.identity(), name)
    return data


class _ValidationMap:
    """Validation on a map-style data set: each rank processes a range."""

    max_batch_size: int | None = None
    """Maximum number of samples of a rank's batch; None for its share of a global batch."""

    def __init__(
        self, loader_parts: DataLoaderParts, loading: LoaderConfig, data_rank: DataRank, name: str
    ) -> None:
        self._loading, self._data_rank, self._name = loading, data_rank, name
        self._batch_rank = replace(data_rank, grain_size=None)
        self._fetcher = make_fetcher(
            loader_parts.dataset, loading.collate_fn, loading.seeds("validation"), name
        )
        self._fetcher.refuses_none = True
        batch_size, num_samples = loading.global_batch_size, self._fetcher.num_samples
        self._drawn: DrawnEpoch | None = None
        if loader_parts.sampler is not None:
            self._drawn = SamplerPlan(loader_parts, batch_size, num_samples, loading.seed, name).draw(0)
        self._batch_size = data_rank.grain_size or data_rank.largest(batch_size)
        self._num_samples = num_samples - (num_samples % batch_size if loader_parts.drop_last else 0)

    def identity(self) -> dict[str, Any]:
        return {
            "num_samples": self._num_samples,
            **({"order": self._drawn.digest} if self._drawn is not None else {}),
        }

    def first_batch(self) -> int:
        """Return the number of this rank's first batch among the batches of all ranks, with grains."""
        if self._drawn is None:
            return self._data_rank.part(self._num_samples)[0] // self._batch_size
        low, _ = self._batch_rank.part(len(self._drawn.ends))
        return sum(-(-len(self._drawn.batch(number)) // self._batch_size) for number in range(low))

    def batches(self) -> Generator[tuple[int, Any], None, None]:
        """Yield (number of samples, batch) of this rank's part; augmentation is always the same."""
        sizes: deque[int] = deque()

        def orders() -> Iterator[BatchOrder]:
            for indices in self._rank_batches():
                sizes.append(len(indices))
                yield 0, indices

        with closing(load_batches(self._loading, self._fetcher, orders(), self._name)) as batches:
            for batch in batches:
                yield sizes.popleft(), batch

    def _rank_batches(self) -> Iterator[torch.Tensor]:
        if self._drawn is None:
            low, high = self._data_rank.part(self._num_samples)
            size = self._limited(self._batch_size)
            for start in range(low, high, size):
                yield torch.arange(start, min(start + size, high))
            return
        # Batches stay whole, because their samples may belong together, except to limit their size.
        for number in range(*self._batch_rank.part(len(self._drawn.ends))):
            batch = self._drawn.batch(number)
            size = self._data_rank.grain_size or self._data_rank.largest(len(batch))
            yield from torch.split(batch, self._limited(size))

    def _limited(self, size: int) -> int:
        limit = None if self._data_rank.grain_size else self.max_batch_size
        return size if limit is None else min(size, limit)


class _ValidationStream:
    """Validation on a stream: each rank reads its training shards; ranks with a common shard take turns."""

    max_batch_size: int | None = None

    def __init__(
        self, loader_parts: DataLoaderParts, loading: LoaderConfig, data_rank: DataRank, name: str
    ) -> None:
        self._stream = ShardedStream(loader_parts.dataset, name)
        self._loading, self._data_rank = loading, data_rank
        self._batch_size = data_rank.largest(loading.global_batch_size)

    def identity(self) -> dict[str, Any]:
        return {"num_shards": self._stream.num_shards}

    def first_batch(self) -> int:
        return 0

    def batches(self) -> Generator[tuple[int, Any], None, None]:
        size = min(self._batch_size, self.max_batch_size or self._batch_size)
        readers = ShardReaders(
            self._stream, self._loading, self._data_rank, "validation", chunk_size=size, num_epochs=1
        )
        waiting: list[Any] = []
        with closing(readers):
            for chunk in readers.all_chunks():
                waiting += chunk.samples.values()
                while len(waiting) >= size:
                    yield size, self._loading.collate(waiting[:size])
                    del waiting[:size]
        if waiting:
            yield len(waiting), self._loading.collate(waiting)


ValidationSet = _ValidationMap | _ValidationStream
