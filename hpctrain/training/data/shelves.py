"""What a rank has read of its shards and not trained yet, with marks to which reading can go back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hpctrain.training.data.lanes import Lanes
from hpctrain.training.data.shard_reading import Chunk, Mark
from hpctrain.training.data.shards import ENDLESS


class _Shelf:
    """What was read of a shard in an epoch, and is not trained yet."""

    def __init__(self, mark: Mark | None, length: int | None = None) -> None:
        self.samples: dict[int, Any] = {}
        self.read = mark.number if mark is not None else 0
        self.length = length
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


class Shelves:
    """A shelf for each shard of this rank and each epoch that something was read of."""

    def __init__(
        self,
        own: Sequence[int],
        lengths_in: Callable[[int], torch.Tensor],
        open_lanes: Callable[[], Lanes],
    ) -> None:
        """Make them, empty.

        Args:
            own: the shards of this rank.
            lengths_in: of each shard the length in an epoch; `ENDLESS` where it is not known.
            open_lanes: opens the shards, when something is to be read of them.
        """
        self._own, self._lengths_in, self._open_lanes = own, lengths_in, open_lanes
        self._shelves: dict[tuple[int, int], _Shelf] = {}
        self._lanes: Lanes | None = None

    def begin(self, epoch: int, marks: Mapping[int, Mark | None]) -> None:
        """Begin at these marks, or at the beginning; not in a shard whose mark is None, for it has ended."""
        for shard in self._own:
            if (mark := marks.get(shard, Mark())) is not None:
                self._shelves[epoch, shard] = _Shelf(mark)

    def read(self, epoch: int, shard: int, until: int) -> int | None:
        """Read a shard up to its sample `until`; its length, where that is known by now."""
        shelf = self._shelf(epoch, shard)
        while shelf.length is None and shelf.read < until:
            self._lanes = self._lanes or self._open_lanes()
            chunk = self._lanes.next_chunk(shard)
            self._shelf(chunk.epoch, chunk.shard).put(chunk)
        return shelf.length

    def take(self, epoch: int, shard: int, number: int) -> Any:
        """A sample, which is trained now."""
        return self._shelves[epoch, shard].samples.pop(number)

    def samples(self) -> Iterator[Any]:
        """All samples that wait to be trained."""
        for shelf in self._shelves.values():
            yield from shelf.samples.values()

    def marks(self, epoch: int, taken: Sequence[int]) -> dict[int, Mark | None]:
        """Where reading can go back to, by shard, with so many samples of each trained."""
        return {
            shard: self._shelves[epoch, shard].mark_before(taken[shard])
            for shard in self._own
            if (epoch, shard) in self._shelves
        }

    def forget(self, epoch: int, taken: Sequence[int]) -> None:
        """Let go of marks that are behind, with so many samples of each shard trained."""
        for shard in self._own:
            self._shelf(epoch, shard).mark_before(taken[shard])

    def forget_before(self, epoch: int) -> None:
        """Let go of earlier epochs."""
        self._shelves = {key: shelf for key, shelf in self._shelves.items() if key[0] >= epoch}

    def close(self) -> None:
        """Let go of workers."""
        if self._lanes is not None:
            self._lanes.close()

    def _shelf(self, epoch: int, shard: int) -> _Shelf:
        if (epoch, shard) not in self._shelves:
            length = int(self._lengths_in(epoch)[shard])
            self._shelves[epoch, shard] = _Shelf(None, length if length < ENDLESS else None)
        return self._shelves[epoch, shard]
