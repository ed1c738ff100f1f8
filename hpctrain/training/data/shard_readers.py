"""Read the shards of a stream in chunks, in the rank or in data workers."""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hpctrain.errors import UserError
from hpctrain.torch_compat import dataloader_worker
from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.loader_config import LoaderConfig
from hpctrain.training.data.loader_workers import LoaderWorkers
from hpctrain.training.data.sample_seeds import SampleSeeds
from hpctrain.training.data.stream_order import list_rank_shards, owner_rank

#: Returns true if this rank keeps a sample: (epoch, shard, number in the shard) -> bool. Other samples are
#: read and dropped.
SampleFilter = Callable[[int, int, int], bool]


@dataclass(frozen=True)
class ReaderCheckpoint:
    """Position in a shard at which reading can start."""

    number: int = 0
    """Number of samples of the shard before this position."""
    state: Any = None
    """State from the stream's `state_dict` at this position; None for the beginning of the shard."""
    resumable: bool = False
    """True if the stream has a `state_dict`, so reading can also start at other positions."""


@dataclass(frozen=True)
class ShardChunk:
    epoch: int
    shard: int
    checkpoint: ReaderCheckpoint | None
    """Start of the chunk; None if the stream cannot resume at this position."""
    samples: dict[int, Any]
    """Samples to keep, by their numbers in the shard."""
    stop: int
    """Number of the sample after the chunk."""
    ended: bool
    """True if the shard ends with this chunk."""


class ShardedStream:
    """Stream as a set of shards; a single shard if the stream does not provide shards."""

    def __init__(self, dataset: Any, name: str) -> None:
        if iter(dataset) is dataset and not hasattr(dataset, "load_state_dict"):
            raise UserError(
                f"{name} is of type {type(dataset).__name__}, which can be read only once. Use an "
                "IterableDataset whose __iter__ starts from the beginning in each epoch."
            )
        self._dataset, self.name = dataset, name
        offered = getattr(dataset, "num_shards", None)
        has_shards = callable(getattr(dataset, "shard", None))
        self.num_shards = offered if isinstance(offered, int) and has_shards else 1
        if self.num_shards < 1:
            raise UserError(f"{name} has {self.num_shards} shards, but must have at least one.")

    def shard(self, index: int) -> Any:
        if self.num_shards == 1:
            return self._dataset
        return self._dataset.shard(num_shards=self.num_shards, index=index)


class _ShardReader:
    def __init__(self, stream: ShardedStream, shard: int, epoch: int, checkpoint: ReaderCheckpoint) -> None:
        self._epoch, self._shard, self._number = epoch, shard, checkpoint.number
        self._opened_at = checkpoint
        self._name = stream.name
        dataset = stream.shard(shard)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        self._samples = iter(dataset)
        # In torchdata's protocol, either the iterator or the data set has the state.
        self._holder = next((h for h in (self._samples, dataset) if _keeps_state(h)), None)
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

    def chunk(self, size: int, keep: SampleFilter, seeds: SampleSeeds) -> ShardChunk:
        """Read the next `size` samples, or fewer at the end of the shard."""
        epoch, shard, start = self._epoch, self._shard, self._number
        checkpoint = self._checkpoint()
        samples: dict[int, Any] = {}
        ended = False
        with seeds.fetching():
            while self._number < start + size and not ended:
                seeds.enter(epoch, shard, self._number)
                try:
                    sample = next(self._samples)
                except StopIteration:
                    ended = True
                except Exception as error:
                    error.add_note(
                        f"hpctrain: This error was raised while reading sample {self._number} of shard "
                        f"{shard} of {self._name} in epoch {epoch}."
                    )
                    raise
                else:
                    if keep(epoch, shard, self._number):
                        samples[self._number] = sample
                    self._number += 1
        return ShardChunk(epoch, shard, checkpoint, samples, self._number, ended)

    def _checkpoint(self) -> ReaderCheckpoint | None:
        resumable = self._holder is not None
        if self._number == self._opened_at.number:
            # Some streams have no state before the first read.
            return replace(self._opened_at, resumable=resumable)
        if self._holder is None:
            return None
        return ReaderCheckpoint(self._number, copy.deepcopy(self._holder.state_dict()), resumable=True)


@dataclass
class InterleavedReader(IterableDataset[ShardChunk]):
    """Reader that alternates between shards, chunk by chunk, for all epochs; in the rank or a data worker."""

    stream: ShardedStream
    shards: list[int]
    checkpoints: Mapping[int, ReaderCheckpoint | None]
    """First position to read in each shard in the first epoch, by default 0; None after its end."""
    _: KW_ONLY
    first_epoch: int
    num_epochs: int | None
    chunk_size: int
    keep: SampleFilter
    seeds: SampleSeeds

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
                chunk = reader.chunk(self.chunk_size, self.keep, self.seeds)
                if not chunk.ended:
                    reading.append(reader)
                yield chunk
            epoch, checkpoints = epoch + 1, {}


def is_stream(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def _keeps_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def dump_checkpoints(checkpoints: list[ReaderCheckpoint | None], name: str) -> torch.Tensor:
    buffer = io.BytesIO()
    plain = [
        None if checkpoint is None else (checkpoint.number, checkpoint.state, checkpoint.resumable)
        for checkpoint in checkpoints
    ]
    torch.save(plain, buffer)
    dumped = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    try:
        load_checkpoints(dumped)
    except Exception as error:
        raise UserError(
            f"The state_dict() of {name} contains a value that a checkpoint cannot store. Return only "
            "numbers, strings, tensors, None, and lists, tuples and dicts of these. torch.load reported: "
            f"{error}"
        ) from error
    return dumped


def load_checkpoints(dumped: torch.Tensor) -> list[ReaderCheckpoint | None]:
    plain = torch.load(io.BytesIO(bytes(dumped.tolist())), weights_only=True)
    return [None if pair is None else ReaderCheckpoint(*pair) for pair in plain]


class ShardReaders:
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
        for reader in dict.fromkeys(self._readers.values()):
            yield from reader

    def close(self) -> None:
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
