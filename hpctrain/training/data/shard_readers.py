"""Readers of a rank's shards, in the rank itself or divided among data workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.interleaved_reader import (
    InterleavedReader,
    ReaderCheckpoint,
    ShardChunk,
    ShardedStream,
)
from hpctrain.training.data.loader_config import LoaderConfig
from hpctrain.training.data.loader_workers import LoaderWorkers
from hpctrain.training.data.sample_seeds import SampleSeeds
from hpctrain.training.data.stream_order import list_rank_shards, owner_rank


class ShardReaders:
    """Chunks of a rank's shards. Close the object to stop the data workers."""

    def __init__(
        self,
        stream: ShardedStream,
        loading: LoaderConfig,
        data_rank: DataRank,
        seeds: SampleSeeds,
        *,
        chunk_size: int,
        num_epochs: int | None,
        first_epoch: int = 0,
        trained: Sequence[int] | None = None,
        checkpoints: Mapping[int, ReaderCheckpoint | None] | None = None,
    ) -> None:
        """Distribute the shards to the data workers.

        Args:
            stream: stream to read.
            loading: settings, including the number of data workers.
            data_rank: this rank.
            seeds: random generators of the samples.
            chunk_size: maximum samples per chunk.
            num_epochs: number of epochs to read; None for no limit.
            first_epoch: first epoch to read.
            trained: samples of each shard to skip in the first epoch.
            checkpoints: start of each shard in the first epoch, by default its beginning; None if the shard
                has ended.
        """
        num_shards = stream.num_shards
        own = list_rank_shards(data_rank.rank, num_shards, data_rank.world_size)
        num_workers = min(loading.num_workers, len(own))
        keep = _OwnSampleFilter(data_rank, num_shards, first_epoch, trained or [0] * num_shards)
        self._readers: dict[int, Iterator[ShardChunk]] = {}
        for number in range(max(num_workers, 1)):
            reader = InterleavedReader(
                stream,
                own[number :: max(num_workers, 1)],
                checkpoints or {},
                first_epoch=first_epoch,
                num_epochs=num_epochs,
                chunk_size=chunk_size,
                keep=keep,
                seeds=seeds,
            )
            chunks = loading.workers(reader, None, stream.name, 1) if num_workers else iter(reader)
            self._readers.update(dict.fromkeys(reader.shards, chunks))

    def next_chunk(self, shard: int) -> ShardChunk:
        """Return the next chunk from the reader of `shard`, which may be from another shard of the reader."""
        return next(self._readers[shard])

    def all_chunks(self) -> Iterator[ShardChunk]:
        """Yield all remaining chunks of all shards."""
        for reader in dict.fromkeys(self._readers.values()):
            yield from reader

    def close(self) -> None:
        """Stop the data workers."""
        for reader in self._readers.values():
            if isinstance(reader, LoaderWorkers):
                reader.close()


class _OwnSampleFilter:
    """Filter for samples of this rank that are not yet trained."""

    def __init__(
        self, data_rank: DataRank, num_shards: int, first_epoch: int, trained: Sequence[int]
    ) -> None:
        self._data_rank, self._num_shards = data_rank, num_shards
        self._first_epoch, self._trained = first_epoch, trained

    def __call__(self, epoch: int, shard: int, number: int) -> bool:
        if epoch == self._first_epoch and number < self._trained[shard]:
            return False
        return owner_rank(shard, number, self._num_shards, self._data_rank.world_size) == self._data_rank.rank
