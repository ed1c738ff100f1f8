"""Train a stream: each step has the same samples on any number of ranks.

A stream is a set of shards, each read from its beginning. In round k, each shard longer than k provides its
sample number k, in the order of the shards.

Each rank reads its own shards. The lengths of the shards determine the samples of a batch: the end of a shard
changes the next batch with this shard. Until its end is reached, a shard counts as endless. Ranks therefore
plan two steps ahead. With the result of a step, they exchange a flag for shards that end in the step after
the next. If the flag is set, the ranks also exchange the shards and the numbers of their last samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch

from hpctrain.checkpoint.format.state_tree import split_tree
from hpctrain.errors import CheckpointError, UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.text import pluralize
from hpctrain.training.data.batch_plan import DataRank, RankBatch
from hpctrain.training.data.loader_config import LoaderConfig
from hpctrain.training.data.shard_readers import (
    ReaderCheckpoint,
    ShardChunk,
    ShardedStream,
    ShardReaders,
    list_rank_shards,
    owner_rank,
)
from hpctrain.training.data.step_source import MicroBatch, StepData, StepSource, StopCondition

#: Maximum number of samples between two checkpoints of a shard; a resumed run starts reading at a checkpoint.
_MAX_CHUNK = 64
#: Number of steps planned in advance.
_AHEAD = 2
#: Length of a shard whose end has not been reached yet.
UNKNOWN_LENGTH = 2**62


class StreamCursor(NamedTuple):
    epoch: int = 0
    batch: int = 0
    """Number of batches of the epoch before this position."""
    round: int = 0
    shard: int = 0
    """Shards before this shard have already provided their sample of the round."""

    def taken(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the number of samples of each shard before the cursor in its epoch, int64 like `lengths`."""
        rounds = torch.full_like(lengths, self.round)
        rounds[: self.shard] += 1
        return torch.minimum(rounds, lengths)


class StreamBatch(NamedTuple):
    epoch: int
    batch_idx: int
    picks: torch.Tensor
    """Shard of each sample, and index of the sample in the shard; int64 of shape [n, 2]."""
    after: StreamCursor


def next_batch(lengths: torch.Tensor, cursor: StreamCursor, count: int) -> StreamBatch | None:
    """Return the next `count` samples from `cursor`, or the rest of its epoch; None if nothing is left."""
    picks = torch.empty(0, 2, dtype=torch.int64)
    first_round, first_shard = cursor.round, cursor.shard
    while (missing := count - len(picks)) > 0:
        shards = (lengths > first_round).nonzero().flatten()
        if not len(shards):
            break
        rounds = torch.arange(first_round, first_round + missing // len(shards) + 2)
        rows, columns = (lengths[shards] > rounds[:, None]).nonzero(as_tuple=True)
        grid = torch.stack([shards[columns], rounds[rows]], dim=1)
        is_before = (grid[:, 1] == first_round) & (grid[:, 0] < first_shard)
        picks = torch.cat([picks, grid[~is_before][:missing]])
        first_round, first_shard = int(rounds[-1]) + 1, 0
    if not len(picks):
        return None
    last_shard, last_round = picks[-1].tolist()
    after = StreamCursor(cursor.epoch, cursor.batch + 1, last_round, last_shard + 1)
    return StreamBatch(cursor.epoch, cursor.batch, picks, after)


class StreamStepSource(StepSource):
    exchanges_ends = True

    def __init__(
        self,
        dataset: Any,
        loading: LoaderConfig,
        data_rank: DataRank,
        context: DistributedContext,
        until: StopCondition,
    ) -> None:
        self._stream = ShardedStream(dataset, "train_dataset")
        self.loading, self._data_rank, self._context = loading, data_rank, context
        self._until, self.last_step = until, until.steps
        self._rank_shards = list_rank_shards(data_rank.rank, self._stream.num_shards, data_rank.world_size)
        self._step = 0
        self._cursor = StreamCursor()
        #: Plan of the next steps, equal on all ranks: only shard ends received by all ranks are used.
        self._upcoming: deque[StreamBatch] = deque()
        #: Lengths of the shards, by epoch.
        self._lengths: dict[int, torch.Tensor] = {}
        self._buffers: dict[tuple[int, int], _ShardBuffer] = {}
        self._readers: ShardReaders | None = None
        #: Loaded positions; None for a shard that has ended.
        self._checkpoints: dict[int, ReaderCheckpoint | None] = {}
        self._padding_sample: Any = None

    def identity(self) -> dict[str, Any]:
        return {
            "seed": self.loading.seed,
            "num_shards": self._stream.num_shards,
            "global_batch_size": self.loading.global_batch_size,
        }

    def state_dict(self) -> dict[str, Any]:
        cursor = self._cursor
        if self._upcoming and self._upcoming[0].epoch > cursor.epoch:
            cursor = StreamCursor(self._upcoming[0].epoch)
        lengths = self._lengths_in(cursor.epoch)
        taken = cursor.taken(lengths).tolist()
        own = {
            shard: (checkpoint := buffer.checkpoint_before(taken[shard])) and tuple(checkpoint)
            for shard in self._rank_shards
            if (buffer := self._buffers.get((cursor.epoch, shard))) is not None
        }
        checkpoints: dict[int, tuple[Any, ...] | None] = dict(self._checkpoints)
        for of_rank in self._context.all_gather(own, "train_dataset"):
            checkpoints |= of_rank
        marks = [checkpoints.get(shard) for shard in range(self._stream.num_shards)]
        try:
            split_tree(marks, "The state_dict() of train_dataset")
        except CheckpointError as error:
            raise UserError(str(error)) from error
        return {
            **cursor._asdict(),
            "lengths": [length if length < UNKNOWN_LENGTH else None for length in lengths.tolist()],
            "marks": marks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        cursor = StreamCursor(*(state[name] for name in StreamCursor._fields))
        lengths = torch.tensor(
            [UNKNOWN_LENGTH if length is None else length for length in state["lengths"]], dtype=torch.int64
        )
        taken = cursor.taken(lengths)
        if isinstance(state["marks"], torch.Tensor):
            raise UserError(
                "The checkpoint contains positions of a stream in the format of an older hpctrain. "
                "Resume the run with that version, or start a new run."
            )
        checkpoints = [fields and ReaderCheckpoint(*fields) for fields in state["marks"]]
        has_begun, has_ended = ((taken > 0) & (taken < lengths)).tolist(), (taken >= lengths).tolist()
        self._upcoming.clear()
        if any(
            begun and (checkpoint is None or not checkpoint.resumable)
            for begun, checkpoint in zip(has_begun, checkpoints, strict=True)
        ):
            self._cursor, self._lengths, self._checkpoints = StreamCursor(cursor.epoch), {}, {}
            message = (
                "train_dataset had no state_dict() or load_state_dict() when the checkpoint was saved, "
                f"so its position is not restored. Epoch {cursor.epoch} starts over and repeats "
                f"{pluralize(int(taken.sum()), 'sample')}."
            )
            return [message]
        self._cursor, self._lengths = cursor, {cursor.epoch: lengths}
        self._checkpoints = {
            shard: None if has_ended[shard] else checkpoint or ReaderCheckpoint()
            for shard, checkpoint in enumerate(checkpoints)
        }
        return []

    def begin(self, after: int) -> None:
        """Open the shards and agree on the first steps."""
        self._step = after
        for shard in self._rank_shards:
            if (checkpoint := self._checkpoints.get(shard, ReaderCheckpoint())) is not None:
                self._buffers[self._cursor.epoch, shard] = _ShardBuffer(checkpoint)
        self._make_plan()
        self._agree_on_ends()
        # A spare sample for steps without own samples, from another rank if this rank has no samples.
        sample = next(chain.from_iterable(buffer.samples.values() for buffer in self._buffers.values()), None)
        have_samples = self._context.all_gather(sample is not None)
        if self._upcoming and not all(have_samples):
            source = have_samples.index(True)
            spare = self._context.broadcast(sample, source, "a sample for ranks without samples")
            sample = spare if sample is None else sample
        self._padding_sample = sample

    def steps(self) -> Iterator[StepData]:
        while self._upcoming:
            batch = self._upcoming.popleft()
            self._cursor, epoch = batch.after, batch.epoch
            self._lengths = {key: lengths for key, lengths in self._lengths.items() if key >= epoch}
            self._step += 1
            shards, numbers = batch.picks.unbind(1)
            of_ranks = owner_rank(shards, numbers, self._stream.num_shards, self._data_rank.world_size)
            picks = batch.picks[of_ranks == self._data_rank.rank]
            rank_batch = RankBatch(
                self._step,
                epoch,
                batch.batch_idx,
                batch_size=len(batch.picks),
                largest=int(of_ranks.bincount().max()),
                indices=picks,
            )
            samples = [self._buffers[epoch, shard].samples.pop(number) for shard, number in picks.tolist()]
            if batch.batch_idx == 0:
                self._checkpoints = {}
            taken = batch.after.taken(self._lengths_in(epoch)).tolist()
            self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[0] >= epoch}
            for shard in self._rank_shards:  # drop checkpoints that are no longer needed
                self._buffer(epoch, shard).checkpoint_before(taken[shard])
            ranges = rank_batch.parts(self.micro_batch_size)
            yield StepData(rank_batch, len(ranges), self._micro_batches(samples, ranges))

    def close(self) -> None:
        if self._readers is not None:
            self._readers.close()
        self._readers = None
        self._buffers.clear()

    def local_ends(self) -> float:
        self._make_plan()
        return float(bool(self._unplanned_ends()))

    def receive_ends(self, total: float) -> None:
        if total:
            self._agree_on_ends()

    @property
    def at_epoch_end(self) -> bool:
        return not self._upcoming or self._upcoming[0].batch_idx == 0

    @property
    def finished(self) -> bool:
        return not self._upcoming

    def _micro_batches(self, samples: list[Any], ranges: list[tuple[int, int]]) -> Iterator[MicroBatch]:
        for low, high in ranges:
            yield MicroBatch(self.loading.collate(samples[low:high] or [self._padding_sample]), high - low)

    def _lengths_in(self, epoch: int) -> torch.Tensor:
        if epoch not in self._lengths:
            self._lengths[epoch] = torch.full((self._stream.num_shards,), UNKNOWN_LENGTH)
        return self._lengths[epoch]

    def _make_plan(self) -> None:
        while len(self._upcoming) < _AHEAD:
            if self._until.steps is not None and self._step + len(self._upcoming) >= self._until.steps:
                return
            batch = self._compose(self._upcoming[-1].after if self._upcoming else self._cursor)
            if batch is None:
                return
            self._upcoming.append(batch)

    def _compose(self, cursor: StreamCursor) -> StreamBatch | None:
        """Return the batch from `cursor`, based on available lengths; None if training has ended."""
        while self._until.epochs is None or cursor.epoch < self._until.epochs:
            batch = next_batch(self._lengths_in(cursor.epoch), cursor, self.loading.global_batch_size)
            if batch is not None:
                return batch
            if cursor.batch == 0:
                raise UserError(f"train_dataset yielded no samples in epoch {cursor.epoch}.")
            cursor = StreamCursor(cursor.epoch + 1)
        return None

    def _unplanned_ends(self) -> dict[tuple[int, int], int]:
        """Return the ends of own shards that are not yet in the plan, by (epoch, shard)."""
        ends: dict[tuple[int, int], int] = {}
        for batch in self._upcoming:
            until = batch.after.taken(self._lengths_in(batch.epoch)).tolist()
            for shard in self._rank_shards:
                length = self._read(batch.epoch, shard, until[shard])
                if length is not None and length < until[shard]:
                    ends[batch.epoch, shard] = length
        return ends

    def _agree_on_ends(self) -> None:
        """Collective. Plan until all ranks have exchanged all ends of shards."""
        while True:
            ends: dict[tuple[int, int], int] = {}
            for ends_of_rank in self._context.all_gather(self._unplanned_ends()):
                ends.update(ends_of_rank)
            if not ends:
                return
            for (epoch, shard), length in ends.items():
                self._lengths_in(epoch)[shard] = length
            self._upcoming.clear()
            self._make_plan()

    def _read(self, epoch: int, shard: int, until: int) -> int | None:
        """Read a shard up to sample `until`; return its length if the end was reached."""
        buffer = self._buffer(epoch, shard)
        while buffer.length is None and buffer.read < until:
            self._readers = self._readers or self._open_readers()
            chunk = self._readers.next_chunk(shard)
            self._buffer(chunk.epoch, chunk.shard).put(chunk)
        return buffer.length

    def _buffer(self, epoch: int, shard: int) -> _ShardBuffer:
        if (epoch, shard) not in self._buffers:
            length = int(self._lengths_in(epoch)[shard])
            self._buffers[epoch, shard] = _ShardBuffer(None, length if length < UNKNOWN_LENGTH else None)
        return self._buffers[epoch, shard]

    def _open_readers(self) -> ShardReaders:
        cursor, batch_size = self._cursor, self.loading.global_batch_size
        return ShardReaders(
            self._stream,
            self.loading,
            self._data_rank,
            "training",
            chunk_size=min(-(-batch_size // self._stream.num_shards), _MAX_CHUNK),
            num_epochs=self._until.epochs,
            first_epoch=cursor.epoch,
            trained=cursor.taken(self._lengths_in(cursor.epoch)).tolist(),
            checkpoints=self._checkpoints,
        )


class _ShardBuffer:
    def __init__(self, checkpoint: ReaderCheckpoint | None, length: int | None = None) -> None:
        self.samples: dict[int, Any] = {}
        self.read = checkpoint.number if checkpoint is not None else 0
        self.length = length
        self._checkpoints: deque[ReaderCheckpoint] = deque([checkpoint] if checkpoint is not None else [])

    def put(self, chunk: ShardChunk) -> None:
        self.samples.update(chunk.samples)
        self.read = chunk.stop
        if chunk.checkpoint is not None:
            self._checkpoints.append(chunk.checkpoint)
        if chunk.ended:
            self.length = chunk.stop

    def checkpoint_before(self, number: int) -> ReaderCheckpoint | None:
        """Return the last checkpoint at or before sample `number`; drop earlier checkpoints."""
        while len(self._checkpoints) > 1 and self._checkpoints[1].number <= number:
            self._checkpoints.popleft()
        return self._checkpoints[0] if self._checkpoints else None
