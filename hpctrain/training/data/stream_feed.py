"""Feeds from a stream: each step trains the same samples on any number of ranks.

Every rank reads the shards that are its own. Which samples make up a batch follows from the lengths of the
shards; a shard that turns out to have ended changes the batch it should have been in. Ranks therefore look
two steps ahead: with the result of a step they tell each other whether some shard ends in the step after the
next, and only then do they stop to exchange which, and where.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

from hpctrain.errors import UserError
from hpctrain.runtime.process_group import Team
from hpctrain.training.data.feed import MicroBatch, Step, Until
from hpctrain.training.data.lanes import Lanes
from hpctrain.training.data.loading import Loading, pinned
from hpctrain.training.data.plan import Deal, Share
from hpctrain.training.data.randomness import SampleSeeds
from hpctrain.training.data.shard_reading import (
    Chunk,
    Mark,
    ShardedStream,
    dump_marks,
    load_marks,
)
from hpctrain.training.data.shards import ENDLESS, Cursor, StreamBatch, next_batch, reader, shards_of

#: Steps of which the ranks know the samples in advance.
_AHEAD = 2
#: A mark in a shard for every so many samples at the least: reading begins at one after a resume.
_LONGEST_CHUNK = 64


class _Shelf:
    """What was read of a shard in an epoch, and is not trained yet."""

    def __init__(self, mark: Mark | None) -> None:
        self.samples: dict[int, Any] = {}
        self.read = mark.number if mark is not None else 0
        self.length: int | None = None
        self._marks: deque[Mark] = deque([mark] if mark is not None else [])

    def put(self, chunk: Chunk) -> None:
        self.samples.update(chunk.samples)
        self.read = chunk.stop
        if chunk.mark is not None:
            self._marks.append(chunk.mark)
        if chunk.ended:
            self.length = chunk.stop

    def mark_before(self, number: int) -> Mark | None:
        """The last mark that is not behind sample `number`; marks before it are forgotten."""
        while len(self._marks) > 1 and self._marks[1].number <= number:
            self._marks.popleft()
        return self._marks[0] if self._marks else None


class StreamFeed:
    """Feeds from an `IterableDataset`, or what is like one."""

    micro_batch_size: int | None = None

    def __init__(
        self,
        dataset: Any,
        loading: Loading,
        deal: Deal,
        team: Team,
        *,
        seed: int,
        global_batch_size: int,
        until: Until,
    ) -> None:
        """Look at the stream.

        Raises:
            UserError: it can be read only once.
        """
        self._stream = ShardedStream(dataset, "train_dataset")
        self._loading, self._deal, self._team = loading, deal, team
        self._seed, self._global_batch_size, self._until = seed, global_batch_size, until
        self._collate = loading.collate_fn or default_collate
        self.last_step: int | None = until.steps
        self._own = shards_of(deal.rank, self._stream.num_shards, deal.world_size)
        self._step, self._cursor = 0, Cursor()
        self._lengths: dict[int, torch.Tensor] = {}
        self._planned: deque[StreamBatch] = deque()
        self._marks: dict[int, Mark | None] = {}
        self._shelves: dict[tuple[int, int], _Shelf] = {}
        self._lanes: Lanes | None = None
        self._spare: Any = None

    # What a checkpoint keeps.

    def identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "num_shards": self._stream.num_shards,
            "global_batch_size": self._global_batch_size,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position after the step that was given last. All ranks must call this.

        Raises:
            UserError: the stream's own state cannot be kept.
        """
        cursor = self._cursor
        if self._planned and self._planned[0].epoch > cursor.epoch:
            cursor = Cursor(self._planned[0].epoch)
        lengths = self._lengths_in(cursor.epoch)
        taken = cursor.taken(lengths).tolist()
        own = {
            shard: self._shelves[cursor.epoch, shard].mark_before(taken[shard])
            for shard in self._own
            if (cursor.epoch, shard) in self._shelves
        }
        marks: dict[int, Mark | None] = {}
        for told in self._team.gather(own):
            marks.update(told)
        of_all = [marks.get(shard, self._marks.get(shard)) for shard in range(self._stream.num_shards)]
        return {
            "epoch": cursor.epoch,
            "batch": cursor.batch,
            "round": cursor.round,
            "shard": cursor.shard,
            "lengths": [length if length < ENDLESS else None for length in lengths.tolist()],
            "marks": dump_marks(of_all, "train_dataset"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        cursor = Cursor(state["epoch"], state["batch"], state["round"], state["shard"])
        lengths = torch.tensor([ENDLESS if n is None else n for n in state["lengths"]], dtype=torch.int64)
        taken = cursor.taken(lengths)
        marks = load_marks(state["marks"])
        begun = [
            shard
            for shard, (number, length) in enumerate(zip(taken.tolist(), lengths.tolist(), strict=True))
            if 0 < number < length
        ]
        if any((mark := marks[shard]) is None or not mark.resumable for shard in begun):
            self._cursor = Cursor(cursor.epoch)
            remark = (
                "train_dataset has no state_dict and load_state_dict to say where it was: it begins epoch "
                f"{cursor.epoch} anew, and trains {int(taken.sum())} samples of it again."
            )
            return [remark]
        self._cursor, self._lengths = cursor, {cursor.epoch: lengths}
        ended = (taken >= lengths).tolist()
        self._marks = {shard: None if ended[shard] else mark or Mark() for shard, mark in enumerate(marks)}
        return []

    # The loop.

    def begin(self, after: int) -> None:
        """Open the shards and agree on the first steps. All ranks must call this.

        Raises:
            UserError: the stream is empty.
        """
        self._step = after
        epoch, marks = self._cursor.epoch, self._marks
        for shard in self._own:
            if (mark := marks.get(shard, Mark())) is not None:
                self._shelves[epoch, shard] = _Shelf(mark)
        self._plan_ahead()
        self._settle()
        self._find_spare()

    def steps(self) -> Iterator[Step]:
        while self._planned:
            batch = self._planned.popleft()
            self._step, self._cursor = self._step + 1, batch.after
            of_ranks = self._readers(batch)
            mine = batch.picks[of_ranks == self._deal.rank]
            share = Share(
                self._step,
                batch.epoch,
                batch.batch_idx,
                batch_size=len(batch.picks),
                largest=int(of_ranks.bincount().max()),
                indices=mine,
            )
            samples = [
                self._shelves[batch.epoch, shard].samples.pop(number) for shard, number in mine.tolist()
            ]
            self._forget(batch)
            parts = share.parts(self.micro_batch_size)
            yield Step(share, len(parts), self._micro_batches(samples, parts))

    def close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()

    def trial(self) -> tuple[int, Any]:
        of_ranks = self._readers(self._planned[0])
        some = [sample for shelf in self._shelves.values() for sample in shelf.samples.values()]
        some = some or [self._spare]

        def batch_of(count: int) -> Any:
            return self._batch([some[i % len(some)] for i in range(count)])

        return int(of_ranks.bincount().max()), batch_of

    def news(self) -> float:
        self._plan_ahead()
        return float(bool(self._ends_to_tell()))

    def hear(self, news: float) -> None:
        if news:
            self._settle()

    @property
    def at_epoch_end(self) -> bool:
        return not self._planned or self._planned[0].batch_idx == 0

    @property
    def finished(self) -> bool:
        return not self._planned

    def _readers(self, batch: StreamBatch) -> torch.Tensor:
        """The rank of each sample."""
        shard, number = batch.picks.unbind(1)
        return reader(shard, number, self._stream.num_shards, self._deal.world_size)

    def _micro_batches(self, samples: list[Any], parts: list[tuple[int, int]]) -> Iterator[MicroBatch]:
        for low, high in parts:
            yield MicroBatch(self._batch(samples[low:high] or [self._spare]), high - low)

    def _batch(self, samples: list[Any]) -> Any:
        batch = self._collate(samples)
        return pinned(batch) if self._loading.pin_memory else batch

    # What comes next, and how the ranks agree on it.

    def _lengths_in(self, epoch: int) -> torch.Tensor:
        if epoch not in self._lengths:
            self._lengths[epoch] = torch.full((self._stream.num_shards,), ENDLESS)
        return self._lengths[epoch]

    def _plan_ahead(self) -> None:
        while len(self._planned) < _AHEAD:
            if self._until.steps is not None and self._step + len(self._planned) >= self._until.steps:
                return
            batch = self._compose(self._planned[-1].after if self._planned else self._cursor)
            if batch is None:
                return
            self._planned.append(batch)

    def _compose(self, cursor: Cursor) -> StreamBatch | None:
        """The batch from `cursor` on, as far as lengths are known; None where the training has ended."""
        while self._until.epochs is None or cursor.epoch < self._until.epochs:
            batch = next_batch(self._lengths_in(cursor.epoch), cursor, self._global_batch_size)
            if batch is not None:
                return batch
            if cursor.batch == 0:
                raise UserError(f"train_dataset gave no sample in epoch {cursor.epoch}.")
            cursor = Cursor(cursor.epoch + 1)
        return None

    def _ends_to_tell(self) -> dict[tuple[int, int], int]:
        """Ends of own shards that the planned batches do not know of, by (epoch, shard)."""
        ends: dict[tuple[int, int], int] = {}
        for batch in self._planned:
            needed = Cursor(batch.epoch, 0, batch.after.round, batch.after.shard)
            until = needed.taken(self._lengths_in(batch.epoch))
            for shard in self._own:
                length = self._read(batch.epoch, shard, int(until[shard]))
                if length is not None and length < int(until[shard]):
                    ends[batch.epoch, shard] = length
        return ends

    def _settle(self) -> None:
        """Plan until no rank knows of an end that the others do not know. All ranks must call this."""
        while True:
            ends: dict[tuple[int, int], int] = {}
            for told in self._team.gather(self._ends_to_tell()):
                ends.update(told)
            if not ends:
                return
            for (epoch, shard), length in ends.items():
                self._lengths_in(epoch)[shard] = length
            self._planned.clear()
            self._plan_ahead()

    def _find_spare(self) -> None:
        """Get a sample to go through the motions with; from another rank where this one has none."""
        own = next((sample for shelf in self._shelves.values() for sample in shelf.samples.values()), None)
        have = self._team.gather(own is not None)
        if not self._planned or all(have):
            self._spare = own
            return
        given = self._team.gather(own if self._deal.rank == have.index(True) else None)
        self._spare = own if own is not None else given[have.index(True)]

    # Reading.

    def _read(self, epoch: int, shard: int, until: int) -> int | None:
        """Read a shard up to its sample `until`; its length, where that is known by now."""
        shelf = self._shelf(epoch, shard)
        while shelf.length is None and shelf.read < until:
            self._lanes = self._lanes or self._open_lanes()
            chunk = self._lanes.next_chunk(shard)
            self._shelf(chunk.epoch, chunk.shard).put(chunk)
        return shelf.length

    def _shelf(self, epoch: int, shard: int) -> _Shelf:
        if (epoch, shard) not in self._shelves:
            self._shelves[epoch, shard] = shelf = _Shelf(None)
            length = int(self._lengths_in(epoch)[shard])
            if length < ENDLESS:
                shelf.length = length
        return self._shelves[epoch, shard]

    def _forget(self, batch: StreamBatch) -> None:
        """Let go of what is behind the step that is being given."""
        if batch.batch_idx == 0:
            self._marks = {}
            self._lengths = {epoch: of for epoch, of in self._lengths.items() if epoch >= batch.epoch}
            self._shelves = {key: shelf for key, shelf in self._shelves.items() if key[0] >= batch.epoch}
        taken = batch.after.taken(self._lengths_in(batch.epoch)).tolist()
        for shard in self._own:
            self._shelf(batch.epoch, shard).mark_before(taken[shard])

    def _open_lanes(self) -> Lanes:
        epoch, num_shards = self._cursor.epoch, self._stream.num_shards
        return Lanes(
            self._stream,
            self._loading,
            self._deal,
            SampleSeeds(self._seed, "training", seed_globals=self._loading.seed_samples),
            chunk_size=min(-(-self._global_batch_size // num_shards), _LONGEST_CHUNK),
            num_epochs=self._until.epochs,
            first_epoch=epoch,
            trained=self._cursor.taken(self._lengths_in(epoch)).tolist(),
            marks=self._marks,
        )
