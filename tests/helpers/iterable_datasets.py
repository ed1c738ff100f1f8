"""Streams of typical users: with torchdata's protocol or without, sharded or not."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info


class PlainDataset(IterableDataset):
    """One stream without state: `length` numbers, of which a DataLoader worker takes its share."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, every = (info.id, info.num_workers) if info else (0, 1)
        for i in range(start, self.length, every):
            yield torch.tensor([0, i])


class StatefulDataset(PlainDataset):
    """With torchdata's protocol, the dataset keeps the state."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            self.at += 1
            yield torch.tensor([0, self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class ShardedDataset(IterableDataset):
    """It has Hugging Face's names and behaviour: shards, epochs, and a state once iteration has begun."""

    def __init__(self, lengths: list[int], shards: list[int] | None = None, per_epoch: int = 0) -> None:
        self.lengths, self.per_epoch = lengths, per_epoch
        self.shards = list(range(len(lengths))) if shards is None else shards
        self.epoch = 0
        self._state: dict[str, Any] | None = None
        self._from: dict[str, Any] | None = None

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> "ShardedDataset":
        assert num_shards == self.num_shards
        return type(self)(self.lengths, [self.shards[index]], self.per_epoch)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is None
        begin = 0
        if self._from is not None and self._from["epoch"] == self.epoch:
            begin = self._from["at"]
        self._state = {"epoch": self.epoch, "at": begin}
        for shard in self.shards:
            for i in range(begin, self.lengths[shard] + self.per_epoch * self.epoch):
                self._state["at"] = i + 1
                yield torch.tensor([shard, i])

    def state_dict(self) -> dict[str, Any] | None:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._from = state


class StatefulIteratorDataset:
    """Not a torch class; the iterator keeps the state."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> "_Numbers":
        return _Numbers(self.length)


class _Numbers:
    def __init__(self, length: int) -> None:
        self.at, self.length = 0, length

    def __iter__(self) -> "_Numbers":
        return self

    def __next__(self) -> Any:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return torch.tensor([0, self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])
