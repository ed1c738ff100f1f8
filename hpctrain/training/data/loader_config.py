"""Hold the settings of loading, and read those of a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from hpctrain.errors import UserError
from hpctrain.training.base.tensors import map_tensors
from hpctrain.training.data.fetcher import Collate
from hpctrain.training.data.sample_seeds import SampleSeeds
from hpctrain.training.data.stateful_batch_sampler import StatefulBatchSampler

if TYPE_CHECKING:
    from hpctrain.runtime.distributed_context import DistributedContext
    from hpctrain.training.trainer_config import TrainerConfig


@dataclass(frozen=True)
class LoaderConfig:
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

    def with_loader_batch_size(self, batch_size: int, name: str) -> LoaderConfig:
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
        if self.accumulate_grad_batches > 1:
            raise UserError(
                f"accumulate_grad_batches is {self.accumulate_grad_batches}, but {problem}, so the batches "
                f"of a step are unknown. {remedy}, or set global_batch_size and micro_batch_size instead."
            )

    def with_batches_of(self, batch_size: int, name: str) -> LoaderConfig:
        if self.global_batch_size_is_set and self.global_batch_size != batch_size:
            raise UserError(
                f"global_batch_size is {self.global_batch_size}, but the largest batch of {name}'s batch "
                f"sampler has {batch_size} samples. The ranks divide each batch of the batch sampler "
                "among themselves. Make the batch sampler return batches for all ranks together, and "
                "remove global_batch_size."
            )
        return replace(self, global_batch_size=batch_size)

    def seeds(self, purpose: str) -> SampleSeeds:
        return SampleSeeds(self.seed, purpose, seed_globals=self.seed_samples)

    def collate(self, samples: list[Any]) -> Any:
        batch = (self.collate_fn or default_collate)(samples)
        return pin_batch(batch) if self.pin_memory else batch


def make_loader_config(settings: TrainerConfig, context: DistributedContext) -> LoaderConfig:
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
    return device.type != "cpu"


def to_device(batch: Any, device: torch.device) -> Any:
    if not needs_transfer(device):
        return batch
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pin_batch(batch: Any) -> Any:
    """Return `batch` with every CPU tensor in pinned memory, for asynchronous copies to a GPU."""
    return map_tensors(batch, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())


@dataclass(frozen=True)
class DataLoaderParts:
    dataset: Any
    shuffle: bool = True
    """True for an order that depends on seed and epoch. Only for training, and without `sampler`."""
    drop_last: bool = False
    """True to omit the last batch of each epoch if it is incomplete."""
    sampler: Iterable[Any] | None = None
    yields_batches: bool = False


def unpack_dataloader(data: Any, loading: LoaderConfig, name: str) -> tuple[DataLoaderParts, LoaderConfig]:
    """Return the parts of a DataLoader, which is never iterated, and `loading` with its settings."""
    if not isinstance(data, DataLoader):
        return DataLoaderParts(data), loading
    _check_supported(data, name)
    batch_sampler, sampler, batch_size = data.batch_sampler, data.sampler, data.batch_size
    if type(batch_sampler) is BatchSampler:
        sampler, batch_size = batch_sampler.sampler, batch_sampler.batch_size
    loading = replace(
        loading,
        collate_fn=loading.collate_fn if data.collate_fn is default_collate else data.collate_fn,
        num_workers=data.num_workers or loading.num_workers,
        prefetch_factor=loading.prefetch_factor
        if data.prefetch_factor in (None, 2)
        else data.prefetch_factor,
        timeout_s=data.timeout or loading.timeout_s,
        worker_init_fn=data.worker_init_fn,
    )
    if isinstance(data.dataset, IterableDataset):
        assert batch_size is not None
        return DataLoaderParts(data.dataset), loading.with_loader_batch_size(batch_size, name)
    if batch_size is None:
        assert batch_sampler is not None
        loading.check_accumulation(
            f"{name} is a DataLoader with a batch_sampler", "Return larger batches from the batch sampler"
        )
        return DataLoaderParts(data.dataset, sampler=batch_sampler, yields_batches=True), loading
    loading = loading.with_loader_batch_size(batch_size, name)
    drop_last = data.drop_last or getattr(batch_sampler, "drop_last", False)
    if drop_last:
        loading.check_accumulation(f"{name} is a DataLoader with drop_last=True", "Remove drop_last")
    if type(sampler) is DistributedSampler:  # hpctrain divides batches among the ranks itself
        return DataLoaderParts(data.dataset, sampler.shuffle, drop_last), loading
    if type(sampler) is SequentialSampler or is_permutation(sampler, data.dataset):
        return DataLoaderParts(data.dataset, type(sampler) is RandomSampler, drop_last), loading
    return DataLoaderParts(data.dataset, False, drop_last, sampler), loading


def is_permutation(sampler: Any, dataset: Any) -> bool:
    is_random = type(sampler) is RandomSampler and not sampler.replacement
    return is_random and sampler.num_samples == len(dataset)


def _check_supported(loader: DataLoader[Any], name: str) -> None:
    kind, samplers = type(loader), (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if kind.__iter__ is not DataLoader.__iter__ and not kind.__module__.startswith("torchdata."):
        problem = (
            f"of type {kind.__name__}, which overrides __iter__, so its batches cannot be divided among the "
            "ranks"
        )
        remedy = "Pass the data set itself, or a plain DataLoader with the same sampler and collate_fn."
    elif loader.batch_sampler is None and loader.batch_size is None:
        problem = "a DataLoader with batch_size=None, so its elements cannot be divided among the ranks"
        remedy = "Set batch_size, and make the data set return single samples."
    elif isinstance(loader.dataset, IterableDataset) and loader.drop_last:
        problem = "a DataLoader with drop_last=True, which is not supported for an IterableDataset"
        remedy = "Remove drop_last: the remaining samples then form a smaller last batch."
    elif loader.multiprocessing_context is not None:
        problem = "a DataLoader with a multiprocessing_context, but hpctrain starts the data workers itself"
        remedy = "Remove multiprocessing_context."
    elif any(isinstance(sampler, StatefulBatchSampler) for sampler in samplers):
        problem = "a DataLoader with a StatefulBatchSampler, which is only for loops without the Trainer"
        remedy = "Set batch_size and shuffle instead. The Trainer itself restores the position in the data."
    else:
        return
    raise UserError(f"{name} is {problem}. {remedy}")
