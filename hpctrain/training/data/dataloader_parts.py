"""Parts of a torch DataLoader that replace settings of the Trainer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

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
from hpctrain.training.data.loader_config import LoaderConfig
from hpctrain.training.data.stateful_batch_sampler import StatefulBatchSampler


@dataclass(frozen=True)
class DataLoaderParts:
    """A data set, and the order in which a DataLoader reads it."""

    dataset: Any
    shuffle: bool = True
    """True for an order that depends on seed and epoch. Only for training, and without `sampler`."""
    drop_last: bool = False
    """True to omit the last batch of each epoch if it is incomplete."""
    sampler: Iterable[Any] | None = None
    """Sampler that determines the order, or None."""
    yields_batches: bool = False
    """True if `sampler` is a batch sampler."""


def unpack_dataloader(data: Any, loading: LoaderConfig, name: str) -> tuple[DataLoaderParts, LoaderConfig]:
    """Return the parts of a DataLoader, and `loading` with its settings. The loader itself is never iterated.

    A batch of the DataLoader is divided among all ranks: its `batch_size` becomes the global batch size,
    unless `loading` has one that the user set. Settings with torch's default value do not replace those of
    `loading`. Other data is returned unchanged, as the data set.

    Args:
        data: a DataLoader, or any data that `Trainer.fit` accepts.
        loading: data settings of the Trainer.
        name: name of the data in messages.

    Raises:
        UserError: a part of the DataLoader is not supported.
    """
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
    if type(sampler) is SequentialSampler or _is_permutation(sampler, data.dataset):
        return DataLoaderParts(data.dataset, type(sampler) is RandomSampler, drop_last), loading
    return DataLoaderParts(data.dataset, False, drop_last, sampler), loading


def _is_permutation(sampler: Any, dataset: Any) -> bool:
    """Return true if the sampler is torch's for `shuffle=True`."""
    is_random = type(sampler) is RandomSampler and not sampler.replacement
    return is_random and sampler.num_samples == len(dataset)


def _check_supported(loader: DataLoader[Any], name: str) -> None:
    """Check that hpctrain can load the same batches as the DataLoader.

    Raises:
        UserError: a part of the DataLoader is not supported.
    """
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
