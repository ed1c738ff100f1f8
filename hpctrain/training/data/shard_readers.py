"""Read the shards of a stream in chunks, in the rank or in data workers."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import IterableDataset

from hpctrain.errors import UserError
from hpctrain.torch_compat import dataloader_worker
from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.loader_config import LoaderConfig
from hpctrain.training.data.loader_workers import LoaderWorkers
from hpctrain.training.data.sample_seeds import SampleSeeds

Number = TypeVar("Number", int, torch.Tensor)


def owner_rank(shard: Number, number: Number, num_shards: int, world_size: int) -> Number:
    """Return the rank that trains a sample; several ranks that read the same shard take turns."""
    if num_shards >= world_size:
        return shard % world_size
    ranks_of_shard = (world_size - 1 - shard) // num_shards + 1
    return shard + num_shards * (number % ranks_of_shard)


def list_rank_shards(rank: int, num_shards: int, world_size: int) -> list[int]:
    return list(range(rank, num_shards, world_size)) if num_shards >= world_size else [rank % num_shards]


class ReaderCheckpoint(NamedTuple):
    number: int = 0
    """Number of samples of the shard before this position."""
    state: Any = None
    """State from the stream's `state_dict` at this position; None for the beginning of the shard."""
    resumable: bool = False
    """True if the stream has a `state_dict`, so reading can also start at other positions."""


class ShardChunk(NamedTuple):
    epoch: int
    shard: int
    checkpoint: ReaderCheckpoint | None
    """Start of the chunk; None if the stream cannot resume at this position."""
    samples: dict[int, Any]
    """Samples of this rank that are not yet trained, by their numbers in the shard."""
    stop: int
    ended: bool


class ShardedStream:
    """Stream as a set of shards; a single shard if the stream does not provide shards."""

    def __init__(self, dataset: Any, name: str) -> None:
        if iter(dataset) is dataset and not hasattr(dataset, "load_state_dict"):
            raise UserError(
                f"{name} is of type {type(dataset).__name__}, which can be read only once. Use an "
                "IterableDataset whose __iter__ starts from the beginning in each epoch."
            )
        self._dataset, self.name = dataset, name
        num_shards = getattr(dataset, "num_shards", None)
        has_shards = isinstance(num_shards, int) and callable(getattr(dataset, "shard", None))
        self.num_shards: int = num_shards if has_shards else 1  # type: ignore[assignment]
        if self.num_shards < 1:
            raise UserError(f"{name} has {self.num_shards} shards, but must have at least one.")

    def shard(self, index: int) -> Any:
        if self.num_shards == 1:
            return self._dataset
        return self._dataset.shard(num_shards=self.num_shards, index=index)


class _ShardReader:
    def __init__(self, stream: ShardedStream, shard: int, epoch: int, checkpoint: ReaderCheckpoint) -> None:
        self.epoch, self.shard, self.number = epoch, shard, checkpoint.number
        self._opened_at, self._name = checkpoint, stream.name
        dataset = stream.shard(shard)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        self._samples = iter(dataset)
        # In torchdata's protocol, either the iterator or the data set has the state.
        self._holder = next(
            (
                holder
                for holder in (self._samples, dataset)
                if hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")
            ),
            None,
        )
        if checkpoint.state is None:
            return
        if self._holder is None:
            raise UserError(
                f"{self._name} was at sample {checkpoint.number} of shard {shard} when the checkpoint was "
                "written, but the data set no longer defines state_dict() and load_state_dict(). Restore "
                "these methods, or start a new run in a new folder."
            )
        self._holder.load_state_dict(copy.deepcopy(checkpoint.state))
        if self._holder is dataset:
            self._samples = iter(dataset)

    def next_sample(self, seeds: SampleSeeds) -> Any:
        """Return the next sample; raise StopIteration at the end of the shard."""
        seeds.enter(self.epoch, self.shard, self.number)
        try:
            sample = next(self._samples)
        except StopIteration:
            raise
        except Exception as error:
            error.add_note(
                f"hpctrain: This error was raised while reading sample {self.number} of shard {self.shard} "
                f"of {self._name} in epoch {self.epoch}."
            )
            raise
        self.number += 1
        return sample

    def checkpoint(self) -> ReaderCheckpoint | None:
        resumable = self._holder is not None
        if self.number == self._opened_at.number:
            # Some streams have no state before the first read.
            return self._opened_at._replace(resumable=resumable)
        if self._holder is None:
            return None
        return ReaderCheckpoint(self.number, copy.deepcopy(self._holder.state_dict()), resumable=True)


@dataclass
class InterleavedReader(IterableDataset[ShardChunk]):
    """Reader that alternates between shards, chunk by chunk, for all epochs; in the rank or a data worker."""

    stream: ShardedStream
    shards: list[int]
    data_rank: DataRank
    _: KW_ONLY
    seeds: SampleSeeds
    chunk_size: int
    num_epochs: int | None
    first_epoch: int = 0
    trained: Sequence[int] | None = None
    """Number of samples of each shard that are already trained in the first epoch."""
    checkpoints: Mapping[int, ReaderCheckpoint | None] = field(default_factory=dict)
    """First position to read in each shard in the first epoch, by default 0; None after its end."""

    def __iter__(self) -> Iterator[ShardChunk]:
        # In a DataLoader worker, some streams return only a part of their samples, but each shard has a
        # single reader.
        dataloader_worker._worker_info = None
        epoch, checkpoints = self.first_epoch, dict(self.checkpoints)
        while self.num_epochs is None or epoch < self.num_epochs:
            reading = deque(
                _ShardReader(self.stream, shard, epoch, checkpoint)
                for shard in self.shards
                if (checkpoint := checkpoints.get(shard, ReaderCheckpoint())) is not None
            )
            while reading:
                reader = reading.popleft()
                chunk = self._next_chunk(reader)
                if not chunk.ended:
                    reading.append(reader)
                yield chunk
            epoch, checkpoints = epoch + 1, {}

    def _next_chunk(self, reader: _ShardReader) -> ShardChunk:
        checkpoint, stop = reader.checkpoint(), reader.number + self.chunk_size
        samples: dict[int, Any] = {}
        ended = False
        with self.seeds.fetching():
            while reader.number < stop and not ended:
                try:
                    sample = reader.next_sample(self.seeds)
                except StopIteration:
                    ended = True
                else:
                    if self._is_needed(reader.epoch, reader.shard, reader.number - 1):
                        samples[reader.number - 1] = sample
        return ShardChunk(reader.epoch, reader.shard, checkpoint, samples, reader.number, ended)

    def _is_needed(self, epoch: int, shard: int, number: int) -> bool:
        if self.trained is not None and epoch == self.first_epoch and number < self.trained[shard]:
            return False
        rank, world_size = self.data_rank.rank, self.data_rank.world_size
        return owner_rank(shard, number, self.stream.num_shards, world_size) == rank


class ShardReaders:
    """Chunks of a rank's shards, to be closed; `options` are fields of the readers."""

    def __init__(
        self, stream: ShardedStream, loading: LoaderConfig, data_rank: DataRank, purpose: str, **options: Any
    ) -> None:
        shards = list_rank_shards(data_rank.rank, stream.num_shards, data_rank.world_size)
        num_workers = min(loading.num_workers, len(shards))
        num_readers = max(num_workers, 1)
        self._readers: dict[int, Iterator[ShardChunk]] = {}
        for number in range(num_readers):
            reader = InterleavedReader(
                stream, shards[number::num_readers], data_rank, seeds=loading.seeds(purpose), **options
            )
            chunks = LoaderWorkers(reader, None, loading, stream.name, 1) if num_workers else iter(reader)
            self._readers.update(dict.fromkeys(reader.shards, chunks))

    def next_chunk(self, shard: int) -> ShardChunk:
        """Return the next chunk from the reader of `shard`, which may be from another shard of the reader."""
        return next(self._readers[shard])

    def all_chunks(self) -> Iterator[ShardChunk]:
        for reader in dict.fromkeys(self._readers.values()):
            yield from reader

    def close(self) -> None:
        for reader in self._readers.values():
            if isinstance(reader, LoaderWorkers):
                reader.close()


def is_stream(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
