"""How batches are loaded: in the rank itself, or by workers that run ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.training.data.fetch import Collate, Fetcher, Order
from hpctrain.training.data.workers import Workers

if TYPE_CHECKING:
    from hpctrain.runtime.process_group import Team
    from hpctrain.training.settings import Settings


@dataclass(frozen=True)
class Loading:
    """What a user may say about loading; see `Settings`."""

    num_workers: int = 0
    collate_fn: Collate | None = None
    pin_memory: bool = False
    prefetch_factor: int = 2
    timeout_s: float = 900.0
    seed_samples: bool = True

    def batches(self, fetcher: Fetcher, orders: Iterable[Order], name: str) -> Generator[Any, None, None]:
        """Yield the batch of each order. Workers run ahead of what is asked for.

        Raises:
            HpctrainError: a worker died, or has not answered in time.
        """
        if not self.num_workers:
            batches = fetcher.batches(orders)
            yield from map(pinned, batches) if self.pin_memory else batches
            return
        # As a list, an order travels in one message; a tensor would take a file descriptor each.
        lists = _Once((epoch, indices.tolist()) for epoch, indices in orders)
        with closing(self.workers(_ByOrder(fetcher), lists, name, self.num_workers)) as workers:
            yield from workers

    def workers(self, dataset: Any, orders: Any, name: str, num_workers: int) -> Workers:
        """Start workers on a data set whose elements are whole batches."""
        return Workers(
            dataset,
            orders,
            num_workers=num_workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=self.pin_memory,
            timeout_s=self.timeout_s,
            name=name,
        )


def loading_of(settings: Settings, team: Team) -> Loading:
    """What the settings say about loading."""
    return Loading(
        num_workers=settings.num_workers,
        collate_fn=settings.collate_fn,
        pin_memory=team.device.type == "cuda",
        prefetch_factor=settings.prefetch_factor,
        timeout_s=settings.data_timeout_s,
        seed_samples=settings.seed_samples,
    )


def moves_batches(device: torch.device) -> bool:
    """Whether `to_device` does something."""
    return device.type != "cpu"


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in its tuples, lists and dicts on `device`."""
    if not moves_batches(device):
        return batch
    return with_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pinned(batch: Any) -> Any:
    """`batch` with every tensor of the CPU in pinned memory, from which a GPU copies while others compute."""
    return with_tensors(batch, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())


def with_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`batch` with every tensor in its tuples, lists and dicts changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: with_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(with_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(with_tensors(value, change) for value in batch)
    return batch


class _ByOrder:
    """A data set for torch's DataLoader whose indices are orders and whose elements are batches."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, order: tuple[int, list[int]]) -> Any:
        epoch, indices = order
        return self._fetcher.fetch(epoch, torch.tensor(indices, dtype=torch.int64))


class _Once:
    """Lets a DataLoader iterate a generator, which it takes for a sampler."""

    def __init__(self, orders: Iterator[Any]) -> None:
        self._orders = orders

    def __iter__(self) -> Iterator[Any]:
        return self._orders
