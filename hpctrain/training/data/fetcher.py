"""Fetch and collate batches by the fastest method that the data set supports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from hpctrain.errors import UserError
from hpctrain.training.data.sample_seeds import SampleSeeds, describe_round

Collate = Callable[[list[Any]], Any]
#: Request for a batch: its round, and sample indices as an int64 tensor of shape [n]. Round and index are the
#: seed of a sample. A round is an epoch or, if the epoch repeats samples, a step, negated.
BatchOrder = tuple[int, torch.Tensor]
#: Maximum number of batches to fetch together, and their total size in bytes, to fit into a core's cache.
_BLOCK_BATCHES, _BLOCK_BYTES = 32, 1 << 18


def make_fetcher(dataset: Any, collate_fn: Collate | None, seeds: SampleSeeds, name: str) -> Fetcher:
    subset, inner = _without_subset(dataset)
    columns = _columns(inner, name, strict=collate_fn is None)
    if columns is not None and collate_fn is not None:
        inner = _Rows(inner, columns) if isinstance(inner, (Mapping, tuple)) else inner
        columns = None
    if columns is not None:
        num_samples = len(columns[0])
    else:
        try:
            num_samples = len(inner)
        except TypeError:
            raise UserError(
                f"{name} is of type {type(inner).__name__}, which has no length and is not an "
                "IterableDataset. Define __len__, or subclass IterableDataset."
            ) from None
    if (num_samples if subset is None else len(subset)) < 1:
        raise UserError(f"{name} is empty.")
    if columns is not None:
        return ColumnFetcher(inner, columns, subset)
    return SampleFetcher(inner, num_samples, subset, collate_fn or default_collate, seeds, name)


class _Rows:
    def __init__(self, dataset: Any, columns: list[Any]) -> None:
        self._dataset, self._columns = dataset, columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> Any:
        values = [column[index] for column in self._columns]
        is_mapping = isinstance(self._dataset, Mapping)
        return dict(zip(self._dataset, values, strict=True)) if is_mapping else tuple(values)


class ColumnFetcher:
    """Fetcher that indexes tensors by batches; it runs no user code, so nothing is random."""

    refuses_none = False

    def __init__(self, dataset: Any, columns: list[Any], subset: torch.Tensor | None) -> None:
        self._subset = subset
        self._columns = [(c, isinstance(c, torch.Tensor) and c.device.type == "cpu") for c in columns]
        self._names = list(dataset) if isinstance(dataset, Mapping) else None
        self._alone = isinstance(dataset, torch.Tensor) or _is_array(dataset)
        self._sample_bytes = sum(column.nbytes // max(1, len(column)) for column in columns)
        self.num_samples = len(columns[0]) if subset is None else len(subset)

    def fetch(self, _epoch: int, indices: torch.Tensor) -> Any:
        return self._batch(self._parts(indices))

    def batches(self, orders: Iterable[BatchOrder]) -> Iterator[Any]:
        orders = iter(orders)
        for epoch, indices in orders:
            max_batches = min(_BLOCK_BATCHES, _BLOCK_BYTES // (self._sample_bytes * len(indices) or 1))
            block = [indices, *(indices for _, indices in islice(orders, max(0, max_batches - 1)))]
            if len(block) == 1:
                yield self.fetch(epoch, indices)
                continue
            sizes = [len(indices) for indices in block]
            columns = [torch.split(rows, sizes) for rows in self._parts(torch.cat(block))]
            yield from map(self._batch, zip(*columns, strict=True))

    def _parts(self, indices: torch.Tensor) -> list[torch.Tensor]:
        if self._subset is not None:
            indices = self._subset[indices]
        return [
            column.index_select(0, indices) if is_plain else _index_rows(column, indices)
            for column, is_plain in self._columns
        ]

    def _batch(self, columns: Sequence[torch.Tensor]) -> Any:
        if self._names is not None:
            return dict(zip(self._names, columns, strict=True))
        return columns[0] if self._alone else list(columns)


def _index_rows(column: Any, indices: torch.Tensor) -> torch.Tensor:
    """Return rows of a tensor on another device, or of an array, which may be memory-mapped."""
    if isinstance(column, torch.Tensor):
        return column.index_select(0, indices.to(column.device))
    return torch.from_numpy(column.take(indices.numpy(), 0))


class SampleFetcher:
    """Fetcher that runs user code, in one call of `__getitems__` per batch, or for each sample."""

    refuses_none = False
    """True to refuse None as a sample, which a `collate_fn` usually removes."""

    def __init__(
        self,
        dataset: Any,
        num_samples: int,
        subset: torch.Tensor | None,
        collate: Collate,
        seeds: SampleSeeds,
        name: str,
    ) -> None:
        self._dataset, self._subset, self._collate = dataset, subset, collate
        self._seeds, self._name = seeds, name
        self._gets_batches = callable(getattr(dataset, "__getitems__", None))
        # In this case, no user code runs for samples or collation, so nothing is random.
        self._is_plain = type(dataset) in (list, tuple) and collate is default_collate
        self.num_samples = num_samples if subset is None else len(subset)

    def batches(self, orders: Iterable[BatchOrder]) -> Iterator[Any]:
        for epoch, indices in orders:
            yield self.fetch(epoch, indices)

    def fetch(self, epoch: int, indices: torch.Tensor) -> Any:
        """Return the batch of the samples `indices`, an int64 tensor of shape [n], n ≥ 1."""
        inner: list[int] = (indices if self._subset is None else self._subset[indices]).tolist()
        if self._is_plain:
            return self._collate([self._dataset[index] for index in inner])
        samples: list[Any] = []
        action = f"fetching or collating samples {inner}"
        try:
            with self._seeds.fetching():
                if self._gets_batches:
                    self._seeds.enter_batch(epoch, inner)
                    return self._collated(self._dataset.__getitems__(inner), inner)
                for index in inner:
                    action = f"fetching sample {index}"
                    self._seeds.enter(epoch, index)
                    samples.append(self._dataset[index])
                action = f"collating samples {inner}"
                return self._collated(samples, inner)
        except Exception as error:
            error.add_note(
                f"hpctrain: This error was raised while {action} of {self._name} in {describe_round(epoch)}."
            )
            raise

    def _collated(self, samples: list[Any], inner: list[int]) -> Any:
        if self.refuses_none and any(sample is None for sample in samples):
            missing = [index for index, sample in zip(inner, samples, strict=False) if sample is None]
            raise UserError(
                f"{self._name} returned None for samples {missing}. If collate_fn removes them, the batch "
                "has fewer samples than hpctrain counts when it averages over ranks, micro-batches or "
                "validation batches. Exclude these samples from the data set, for example with "
                "torch.utils.data.Subset."
            )
        return self._collate(samples)


Fetcher = ColumnFetcher | SampleFetcher


def _without_subset(dataset: Any) -> tuple[torch.Tensor | None, Any]:
    """Unwrap torch's Subset, whose `__getitems__` would hide the best fetcher for the inner data set."""
    subset: torch.Tensor | None = None
    while type(dataset) is Subset:
        indices = torch.as_tensor(dataset.indices, dtype=torch.int64)
        subset, dataset = indices if subset is None else indices[subset], dataset.dataset
    return subset, dataset


def _columns(dataset: Any, name: str, *, strict: bool) -> list[Any] | None:
    """Return the tensors and arrays of equal length in `dataset`; None for other data sets."""
    columns: list[Any]
    if type(dataset) is TensorDataset:
        columns = list(dataset.tensors)
    elif isinstance(dataset, Mapping):
        columns = list(dataset.values())
    elif type(dataset) is tuple:
        columns = list(dataset)
    else:
        columns = [dataset]
    if not columns or not all(
        (isinstance(column, torch.Tensor) or _is_array(column)) and column.ndim for column in columns
    ):
        if isinstance(dataset, Mapping) and columns and strict:
            raise UserError(
                f"{name} is a dict, so each of its values must be a tensor or a numeric NumPy array with "
                "at least one dimension."
            )
        return None
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        if type(dataset) is tuple and not strict:
            return None
        raise UserError(f"The tensors or arrays of {name} have different lengths: {lengths}.")
    return columns


def _is_array(value: Any) -> bool:
    """Return true if `value` is a numeric NumPy array; detected without importing the optional NumPy."""
    bases = [(base.__module__, base.__name__) for base in type(value).__mro__]
    return ("numpy", "ndarray") in bases and value.dtype.kind in "biufc"
