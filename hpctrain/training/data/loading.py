"""How a batch gets from the data set to the rank's device."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpctrain.training.data.plan import BatchPlan, Deal, Share, split
from hpctrain.training.rng import derived_seed


@dataclass(frozen=True)
class Loading:
    """How batches are loaded: what torch's DataLoader is told."""

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False

    def loader(self, dataset: Any, fetches: Iterable[list[int]], seed: int) -> DataLoader[Any]:
        """A DataLoader over the index lists in `fetches`, which it may run ahead of."""
        # A generator of its own: an iterator otherwise draws the seed of its workers from the rank's random
        # state, and a resumed run makes one iterator more than an undisturbed one.
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(
            dataset,
            batch_sampler=fetches,
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            worker_init_fn=_shield_from_job_signals if self.num_workers else None,
            generator=generator,
        )


def training_batches(
    dataset: Any, plan: BatchPlan, loading: Loading, *, rank: int, world_size: int, steps: range
) -> Iterator[tuple[Share, Any]]:
    """Yield (share, batch) of `rank` for each step of `steps`, in order."""
    in_flight: deque[Share] = deque()

    def fetches() -> Iterator[list[int]]:
        for step in steps:
            share = plan.share(step, Deal(rank, world_size))
            in_flight.append(share)
            yield share.indices.tolist() or plan.spare(step).tolist()

    seed = derived_seed(plan.order.seed, "data workers", steps.start, rank)
    for batch in loading.loader(dataset, _Once(fetches()), seed):
        yield in_flight.popleft(), batch


def validation_batches(
    dataset: Any, batch_size: int, loading: Loading, *, rank: int, world_size: int
) -> Iterator[tuple[int, Any]]:
    """Yield (number of samples, batch) over `rank`'s part of a data set; all ranks see each sample once."""
    low, high = split(len(dataset), rank, world_size)
    fetches = [list(range(i, min(i + batch_size, high))) for i in range(low, high, batch_size)]
    for fetch, batch in zip(fetches, loading.loader(dataset, fetches, 0), strict=True):
        yield len(fetch), batch


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in its tuples, lists and dicts on `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


class _Once:
    """Lets a DataLoader iterate a generator, which it takes for a sampler."""

    def __init__(self, fetches: Iterator[list[int]]) -> None:
        self._fetches = fetches

    def __iter__(self) -> Iterator[list[int]]:
        return self._fetches


def _shield_from_job_signals(_worker_id: int) -> None:
    """Keep a data worker alive when Slurm signals the whole step: the rank still needs its last batches."""
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
