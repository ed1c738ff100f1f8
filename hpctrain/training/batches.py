"""Which samples a rank trains in a step, and how a batch gets from the data set to the rank's device."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpctrain.training.order import SampleOrder
from hpctrain.training.rng import derived_seed


@dataclass(frozen=True)
class Share:
    """One rank's part of one global batch."""

    step: int
    """The optimizer step that this batch belongs to; the first is 1."""
    epoch: int
    """The epoch that the batch lies in, from 0."""
    indices: tuple[int, ...]
    """Samples of this rank; empty where the batch has fewer samples than there are ranks."""
    batch_size: int
    """Samples of all ranks together."""
    fetch: tuple[int, ...]
    """What to load: `indices`, or one sample of the batch to go through the motions with at weight 0."""

    def weight(self, world_size: int) -> float:
        """Factor on this rank's mean loss under which the mean over ranks is the mean over the batch."""
        return len(self.indices) * world_size / self.batch_size


@dataclass(frozen=True)
class BatchPlan:
    """The order in which a run consumes its data set: a pure function of the step, on any number of ranks.

    Step s lies in epoch (s - 1) // steps_per_epoch. The last batch of an epoch may be short; it is kept.
    """

    order: SampleOrder
    global_batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.order.num_samples // self.global_batch_size)

    def epoch(self, step: int) -> int:
        """The epoch that `step` (counted from 1) lies in, from 0."""
        return (step - 1) // self.steps_per_epoch

    def identity(self) -> dict[str, int]:
        """Everything that the order of samples depends on."""
        return {
            "seed": self.order.seed,
            "num_samples": self.order.num_samples,
            "global_batch_size": self.global_batch_size,
        }

    def share(self, step: int, rank: int, world_size: int) -> Share:
        """What `rank` trains in `step` (counted from 1). Shares differ by one sample at the most."""
        epoch, batch = divmod(step - 1, self.steps_per_epoch)
        start = batch * self.global_batch_size
        stop = min(start + self.global_batch_size, self.order.num_samples)
        low, high = split(stop - start, rank, world_size)
        indices = tuple(self.order.indices(epoch, start + low, start + high).tolist())
        fetch = indices or tuple(self.order.indices(epoch, start, start + 1).tolist())
        return Share(step, epoch, indices, stop - start, fetch)


def split(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """The half-open range of `count` things that is `rank`'s; all ranks together cover each thing once.

    Sizes differ by one at the most, and rank 0 is never empty.
    """
    return -(-count * rank // world_size), -(-count * (rank + 1) // world_size)


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
            share = plan.share(step, rank, world_size)
            in_flight.append(share)
            yield list(share.fetch)

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
