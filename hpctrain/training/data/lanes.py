"""The shards of a rank, open for reading: in the rank itself, or by one worker for a part of them each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpctrain.training.data.loading import Loading
from hpctrain.training.data.plan import Deal
from hpctrain.training.data.randomness import SampleSeeds
from hpctrain.training.data.shard_reading import Chunk, Lane, Mark, ShardedStream
from hpctrain.training.data.shards import reader, shards_of
from hpctrain.training.data.workers import Workers


class Lanes:
    """Chunks of the shards of one rank. Close it to let go of workers."""

    def __init__(
        self,
        stream: ShardedStream,
        loading: Loading,
        deal: Deal,
        seeds: SampleSeeds,
        *,
        chunk_size: int,
        num_epochs: int | None,
        first_epoch: int = 0,
        trained: Sequence[int] | None = None,
        marks: Mapping[int, Mark | None] | None = None,
    ) -> None:
        """Deal out the shards to the workers.

        Args:
            stream: what to read.
            loading: how many workers there are.
            deal: which rank this is.
            seeds: random generators of the samples.
            chunk_size: samples of a chunk at the most.
            num_epochs: epochs to read; None for no end.
            first_epoch: the epoch to begin in.
            trained: samples of each shard to pass over in the first epoch.
            marks: of each shard where to begin in it, its beginning by default; None where it has ended.
        """
        num_shards = stream.num_shards
        own = shards_of(deal.rank, num_shards, deal.world_size)
        num_workers = min(loading.num_workers, len(own))
        keep = _Keeper(deal, num_shards, first_epoch, trained or [0] * num_shards)
        self._lanes: dict[int, Iterator[Chunk]] = {}
        for number in range(max(num_workers, 1)):
            lane = Lane(
                stream,
                own[number :: max(num_workers, 1)],
                marks or {},
                first_epoch=first_epoch,
                num_epochs=num_epochs,
                chunk_size=chunk_size,
                keep=keep,
                seeds=seeds,
            )
            chunks = loading.workers(lane, None, stream.name, 1) if num_workers else iter(lane)
            self._lanes.update(dict.fromkeys(lane.shards, chunks))

    def next_chunk(self, shard: int) -> Chunk:
        """The next chunk of the lane that `shard` is in: of this shard, or of another one in it."""
        return next(self._lanes[shard])

    def all_chunks(self) -> Iterator[Chunk]:
        """All that is left of all shards."""
        for lane in dict.fromkeys(self._lanes.values()):
            yield from lane

    def close(self) -> None:
        """Let go of workers."""
        for lane in self._lanes.values():
            if isinstance(lane, Workers):
                lane.close()


class _Keeper:
    """Tells which samples a rank keeps of those that it reads: the ones that it trains, and has not yet."""

    def __init__(self, deal: Deal, num_shards: int, first_epoch: int, trained: Sequence[int]) -> None:
        self._deal, self._num_shards = deal, num_shards
        self._first_epoch, self._trained = first_epoch, trained

    def __call__(self, epoch: int, shard: int, number: int) -> bool:
        if epoch == self._first_epoch and number < self._trained[shard]:
            return False
        return reader(shard, number, self._num_shards, self._deal.world_size) == self._deal.rank
