"""Give torch's DataLoader the data order of the `Trainer`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from hpctrain.cluster import detect
from hpctrain.errors import UserError
from hpctrain.torch_compat import DataLoaderIterator
from hpctrain.training.data.batch_plan import BatchPlan, DataRank
from hpctrain.training.data.sample_order import SampleOrder, SequentialOrder


class StatefulBatchSampler(Sampler[list[int]]):
    """This rank's share of each global batch, in an order that is the same on any number of ranks.

    Every sample is yielded exactly once per epoch. Pass the sampler as `batch_sampler` to a `DataLoader` or
    to torchdata's `StatefulDataLoader`. Each iteration starts at the current position and ends at the end of
    the epoch.

    If the last batch of an epoch has fewer samples than there are ranks, the other ranks receive a spare
    sample, with `weight` 0.
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
    ) -> None:
        """Start at the first batch of epoch 0.

        Args:
            dataset: the data set, of which only the length is used.
            global_batch_size: samples of all ranks per batch, at least one per rank.
            seed: seed of the order.
            shuffle: False to keep the order of the data set.
            drop_last: True to omit the last batch of each epoch if it is incomplete.
            rank: index of this rank; None takes it from the process group or, without one, the environment.
            num_replicas: number of ranks; None takes it from the same source.

        Raises:
            UserError: the data set has no batch, or a batch has fewer samples than there are ranks.
        """
        self._data_rank = _find_data_rank(rank, num_replicas)
        if len(dataset) < (global_batch_size if drop_last else 1):
            raise UserError(
                f"The data set has {len(dataset)} samples, but global_batch_size is {global_batch_size} and "
                f"drop_last is {drop_last}, so there is no complete batch. Set a smaller global_batch_size."
            )
        if global_batch_size < self._data_rank.world_size:
            raise UserError(
                f"global_batch_size is {global_batch_size}, but there are {self._data_rank.world_size} "
                "ranks. Each rank needs at least one sample per batch. Set a larger global_batch_size."
            )
        order = (SampleOrder if shuffle else SequentialOrder)(len(dataset), seed)
        self._plan = BatchPlan(order, global_batch_size, drop_last)
        self._identity = {**self._plan.identity(), "shuffle": shuffle, "drop_last": drop_last}
        self._start = 0
        self._batches: _BatchIterator | None = None

    @property
    def step(self) -> int:
        """Number of batches yielded by the DataLoader, over all epochs, excluding prefetched batches."""
        return self._start + (self._batches.num_yielded if self._batches else 0)

    @property
    def epoch(self) -> int:
        return self.step // len(self)

    @property
    def weight(self) -> float:
        """Factor for the loss over this rank's part of the last yielded batch.

        With this factor, the mean of the ranks' gradients is the gradient of the global batch. It is 1 if the
        ranks share the batch evenly.
        """
        return self.weight_of(max(self.step, 1))

    def weight_of(self, step: int) -> float:
        """Return the `weight` of the batch of `step`, counted from 1 over all epochs."""
        batch = self._plan.rank_batch(step, self._data_rank)
        return len(batch.indices) / batch.batch_size * self._data_rank.world_size

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch; a position within this epoch is kept."""
        if epoch != self.epoch:
            self._start, self._batches = epoch * len(self), None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch."""
        return {"step": self.step, **self._identity}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position returned by `state_dict`, also on another number of ranks.

        Raises:
            UserError: the state belongs to another order of samples.
        """
        saved = {name: value for name, value in state_dict.items() if name != "step"}
        if saved != self._identity:
            raise UserError(
                f"The checkpoint was saved with {saved}, but this script uses {self._identity}. The order "
                "of samples depends on these values. Restore the old values, or start a new run in a new "
                "folder."
            )
        self._start, self._batches = state_dict["step"], None

    def __len__(self) -> int:
        """Number of batches in a complete epoch."""
        return self._plan.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        caller = sys._getframe(1).f_locals.get("self")
        loader = vars(caller) if isinstance(caller, DataLoaderIterator) else None
        before, self._start, self._batches = self._batches, self.step, None
        self._batches = _BatchIterator(self, loader, before)
        return self._batches

    def _batch(self, step: int) -> list[int]:
        indices = self._plan.rank_batch(step, self._data_rank).indices
        if not len(indices):
            indices = self._plan.rank_batch(step, DataRank(0, self._data_rank.world_size)).indices[:1]
        return [int(index) for index in indices]


class _BatchIterator(Iterator[list[int]]):
    """The remaining batches of an epoch.

    A DataLoader with workers requests batches ahead of those that it has yielded. It counts the latter in an
    attribute. Creating its iterator draws a seed for the workers from torch's generator. The draw is undone,
    so that an epoch that is entered in the middle continues with the same random numbers.
    """

    def __init__(
        self, sampler: StatefulBatchSampler, loader: dict[str, Any] | None, before: _BatchIterator | None
    ) -> None:
        self._sampler, self._loader = sampler, loader
        self._step, self._end = sampler.step, (sampler.epoch + 1) * len(sampler)
        self._num_requested = 0
        self._yielded_before: int | None = None
        is_same = before is not None and before._loader is loader and before._yielded_before is None
        # A DataLoader with workers calls `iter` twice, before and after its draw.
        self._rng_state: torch.Tensor = (
            before._rng_state if before is not None and is_same else torch.get_rng_state()
        )

    @property
    def num_yielded(self) -> int:
        if self._loader is None:
            return self._num_requested
        if self._yielded_before is None:
            return 0
        count: int = self._loader["_num_yielded"] - self._yielded_before
        return count

    def __next__(self) -> list[int]:
        if self._yielded_before is None:
            # A StatefulDataLoader that resumes has a count of the whole epoch.
            self._yielded_before = 0 if self._loader is None else self._loader["_num_yielded"]
            _undo_draw(self._rng_state)
        if self._step == self._end:
            raise StopIteration
        self._step += 1
        self._num_requested += 1
        return self._sampler._batch(self._step)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last requested batch, for a StatefulDataLoader."""
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step = self._sampler._start = state_dict["step"]


def _undo_draw(before: torch.Tensor) -> None:
    """Restore the state of torch's generator if exactly one seed was drawn since."""
    generator = torch.Generator()
    generator.set_state(before)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    if torch.equal(generator.get_state(), torch.get_rng_state()):
        torch.set_rng_state(before)


def _find_data_rank(rank: int | None, num_replicas: int | None) -> DataRank:
    if rank is None or num_replicas is None:
        if dist.is_initialized():
            return DataRank(dist.get_rank(), dist.get_world_size())
        ranks = detect(os.environ)
        return DataRank(ranks.rank, ranks.world_size)
    return DataRank(rank, num_replicas)
