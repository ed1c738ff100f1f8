"""Feeds from a stream: each step trains the same samples on any number of ranks.

Every rank reads the shards that are its own. Which samples make up a batch follows from the lengths of the
shards; a shard that turns out to have ended changes the batch it should have been in. Ranks therefore look
two steps ahead: with the result of a step they tell each other whether some shard ends in the step after the
next, and only then do they stop to exchange which, and where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from hpctrain.runtime.process_group import Team
from hpctrain.training.data.feed import MicroBatch, Step, Until
from hpctrain.training.data.lanes import Lanes
from hpctrain.training.data.loading import Loading, pinned
from hpctrain.training.data.plan import Deal, Share
from hpctrain.training.data.randomness import SampleSeeds
from hpctrain.training.data.shard_reading import Mark, ShardedStream, dump_marks, load_marks
from hpctrain.training.data.shards import ENDLESS, Cursor, StreamBatch, reader, shards_of
from hpctrain.training.data.shelves import Shelves
from hpctrain.training.data.stream_plan import StreamPlan

#: A mark in a shard for every so many samples at the least: reading begins at one after a resume.
_LONGEST_CHUNK = 64


class StreamFeed:
    """Feeds from an `IterableDataset`, or what is like one."""

    micro_batch_size: int | None = None
    has_news = True
    remarks: Sequence[str] = ()

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
        self._step = 0
        self._plan = StreamPlan(self._stream.num_shards, global_batch_size, until)
        self._shelves = Shelves(self._own, self._plan.lengths_in, self._open_lanes)
        self._marks: dict[int, Mark | None] = {}
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
        cursor, coming = self._plan.cursor, self._plan.coming
        if coming and coming[0].epoch > cursor.epoch:
            cursor = Cursor(coming[0].epoch)
        lengths = self._plan.lengths_in(cursor.epoch)
        own = self._shelves.marks(cursor.epoch, cursor.taken(lengths).tolist())
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
            self._plan.begin_at(Cursor(cursor.epoch))
            remark = (
                "train_dataset has no state_dict and load_state_dict to say where it was: it begins epoch "
                f"{cursor.epoch} anew, and trains {int(taken.sum())} samples of it again."
            )
            return [remark]
        self._plan.begin_at(cursor, lengths)
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
        self._shelves.begin(self._plan.cursor.epoch, self._marks)
        self._plan.plan(after)
        self._settle()
        self._find_spare()

    def steps(self) -> Iterator[Step]:
        while self._plan.coming:
            batch = self._plan.take()
            self._step += 1
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
            samples = [self._shelves.take(batch.epoch, *pick) for pick in mine.tolist()]
            if batch.batch_idx == 0:
                self._marks = {}
                self._shelves.forget_before(batch.epoch)
            taken = batch.after.taken(self._plan.lengths_in(batch.epoch)).tolist()
            self._shelves.forget(batch.epoch, taken)
            parts = share.parts(self.micro_batch_size)
            yield Step(share, len(parts), self._micro_batches(samples, parts))

    def close(self) -> None:
        self._shelves.close()

    def trial(self) -> tuple[int, Any]:
        of_ranks = self._readers(self._plan.coming[0])
        some = [*self._shelves.samples()] or [self._spare]

        def batch_of(count: int) -> Any:
            return self._batch([some[i % len(some)] for i in range(count)])

        return int(of_ranks.bincount().max()), batch_of

    def news(self) -> float:
        self._plan.plan(self._step)
        return float(bool(self._ends_to_tell()))

    def hear(self, news: float) -> None:
        if news:
            self._settle()

    @property
    def at_epoch_end(self) -> bool:
        return not self._plan.coming or self._plan.coming[0].batch_idx == 0

    @property
    def finished(self) -> bool:
        return not self._plan.coming

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

    def _ends_to_tell(self) -> dict[tuple[int, int], int]:
        """Ends of own shards that the planned batches do not know of, by (epoch, shard)."""
        ends: dict[tuple[int, int], int] = {}
        for batch in self._plan.coming:
            needed = Cursor(batch.epoch, 0, batch.after.round, batch.after.shard)
            until = needed.taken(self._plan.lengths_in(batch.epoch))
            for shard in self._own:
                length = self._shelves.read(batch.epoch, shard, int(until[shard]))
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
            self._plan.learn(ends)
            self._plan.plan(self._step)

    def _find_spare(self) -> None:
        """Get a sample to go through the motions with; from another rank where this one has none."""
        own = next(self._shelves.samples(), None)
        have = self._team.gather(own is not None)
        if not self._plan.coming or all(have):
            self._spare = own
            return
        given = self._team.gather(own if self._deal.rank == have.index(True) else None)
        self._spare = own if own is not None else given[have.index(True)]

    def _open_lanes(self) -> Lanes:
        cursor, num_shards = self._plan.cursor, self._stream.num_shards
        return Lanes(
            self._stream,
            self._loading,
            self._deal,
            SampleSeeds(self._seed, "training", seed_globals=self._loading.seed_samples),
            chunk_size=min(-(-self._global_batch_size // num_shards), _LONGEST_CHUNK),
            num_epochs=self._until.epochs,
            first_epoch=cursor.epoch,
            trained=cursor.taken(self._plan.lengths_in(cursor.epoch)).tolist(),
            marks=self._marks,
        )
