"""Loading of batches, in the rank itself or by data workers in advance."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from hpctrain.errors import UserError
from hpctrain.training.base.tensor_tree import map_tensors
from hpctrain.training.data.fetcher import BatchOrder, Collate, Fetcher
from hpctrain.training.data.loader_workers import LoaderWorkers
from hpctrain.training.data.sample_seeds import SampleSeeds

if TYPE_CHECKING:
    from hpctrain.runtime.distributed_context import DistributedContext
    from hpctrain.training.trainer_config import TrainerConfig


@dataclass(frozen=True)
class LoaderConfig:
    """Data settings of the user; see `TrainerConfig`."""

    seed: int = 0
    global_batch_size: int = 32
    num_workers: int = 0
    collate_fn: Collate | None = None
    pin_memory: bool = False
    prefetch_factor: int = 2
    timeout_s: float = 900.0
    seed_samples: bool = True
    worker_init_fn: Callable[[int], Any] | None = None
    """Function to call in each data worker; only a DataLoader has one."""
    global_batch_size_is_set: bool = False
    """True if the user set `global_batch_size`, so that a DataLoader cannot replace it."""
    accumulate_grad_batches: int = 1
    """Batches of a DataLoader per optimizer step."""

    def with_loader_batch_size(self, batch_size: int, name: str) -> LoaderConfig:
        """Return these settings with the `batch_size` of a DataLoader, unless the user set another.

        Raises:
            UserError: the global batch size is not a multiple of `batch_size`.
        """
        if not self.global_batch_size_is_set:
            return replace(self, global_batch_size=batch_size * self.accumulate_grad_batches)
        if self.global_batch_size % batch_size:
            raise UserError(
                f"global_batch_size is {self.global_batch_size}, but {name} is a DataLoader with "
                f"batch_size={batch_size}. Set global_batch_size to a multiple of batch_size, such as "
                "batch_size × ranks × accumulation steps. To divide each batch of the DataLoader among "
                "the ranks instead, remove global_batch_size."
            )
        return self

    def check_accumulation(self, problem: str, remedy: str) -> None:
        """Raise an error if several batches of a DataLoader would form a step.

        Raises:
            UserError: `problem` does not permit this.
        """
        if self.accumulate_grad_batches > 1:
            raise UserError(
                f"accumulate_grad_batches is {self.accumulate_grad_batches}, but {problem}, so the batches "
                f"of a step are unknown. {remedy}, or set global_batch_size and micro_batch_size instead."
            )

    def with_batches_of(self, batch_size: int, name: str) -> LoaderConfig:
        """Return these settings with the size of the largest batch of a batch sampler.

        Raises:
            UserError: the user set another global batch size.
        """
        if self.global_batch_size_is_set and self.global_batch_size != batch_size:
            raise UserError(
                f"global_batch_size is {self.global_batch_size}, but the largest batch of {name}'s batch "
                f"sampler has {batch_size} samples. The ranks divide each batch of the batch sampler "
                "among themselves. Make the batch sampler return batches for all ranks together, and "
                "remove global_batch_size."
            )
        return replace(self, global_batch_size=batch_size)

    def seeds(self, purpose: str) -> SampleSeeds:
        """Return the random generators of the samples for `purpose`: "training" or "validation"."""
        return SampleSeeds(self.seed, purpose, seed_globals=self.seed_samples)

    def collate(self, samples: list[Any]) -> Any:
        """Return `samples` as one batch."""
        batch = (self.collate_fn or default_collate)(samples)
        return pin_batch(batch) if self.pin_memory else batch

    def batches(
        self, fetcher: Fetcher, orders: Iterable[BatchOrder], name: str
    ) -> Generator[Any, None, None]:
        """Yield the batch for each order. Data workers load batches in advance.

        Raises:
            HpctrainError: a data worker died or did not respond in time.
        """
        if not self.num_workers:
            batches = fetcher.batches(orders)
            yield from map(pin_batch, batches) if self.pin_memory else batches
            return
        # A list is sent within a message; a tensor would need a file descriptor.
        lists = _OrderSampler((epoch, indices.tolist()) for epoch, indices in orders)
        with closing(self.workers(_BatchDataset(fetcher), lists, name, self.num_workers)) as workers:
            yield from workers

    def workers(self, dataset: Any, orders: Any, name: str, num_workers: int) -> LoaderWorkers:
        """Start data workers on a data set whose elements are batches."""
        return LoaderWorkers(
            dataset,
            orders,
            num_workers=num_workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=self.pin_memory,
            timeout_s=self.timeout_s,
            name=name,
            worker_init_fn=self.worker_init_fn,
        )


def make_loader_config(settings: TrainerConfig, context: DistributedContext) -> LoaderConfig:
    """Return the data settings for a rank."""
    return LoaderConfig(
        seed=settings.seed,
        global_batch_size=settings.global_batch_size,
        num_workers=settings.num_workers,
        collate_fn=settings.collate_fn,
        pin_memory=context.device.type == "cuda",
        prefetch_factor=settings.prefetch_factor,
        timeout_s=settings.dataloader_timeout_s,
        seed_samples=settings.seed_samples,
        global_batch_size_is_set="global_batch_size" in settings.given,
        accumulate_grad_batches=settings.accumulate_grad_batches,
    )


def needs_transfer(device: torch.device) -> bool:
    """Return true if `to_device` has to copy."""
    return device.type != "cpu"


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor in its tuples, lists and dicts on `device`."""
    if not needs_transfer(device):
        return batch
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pin_batch(batch: Any) -> Any:
    """Return `batch` with every CPU tensor in pinned memory, for asynchronous copies to a GPU."""
    return map_tensors(batch, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())


class _BatchDataset:
    """Data set for torch's DataLoader whose indices are orders and whose elements are batches."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, order: tuple[int, list[int]]) -> Any:
        epoch, indices = order
        return self._fetcher.fetch(epoch, torch.tensor(indices, dtype=torch.int64))


class _OrderSampler:
    """Sampler for a DataLoader that wraps a generator."""

    def __init__(self, orders: Iterator[Any]) -> None:
        self._orders = orders

    def __iter__(self) -> Iterator[Any]:
        return self._orders
