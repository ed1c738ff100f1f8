"""Assignment of samples to ranks in each step, for a sampler or batch sampler of the user.

Every rank draws the complete order of an epoch, with random generators seeded by (seed, epoch). The order is
then the same on any number of ranks, and a resumed run draws the epoch again.
"""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import index
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from hpctrain.errors import UserError
from hpctrain.training.base.rng import derive_seed, seeded_rng
from hpctrain.training.data.batch_plan import DataRank, RankBatch
from hpctrain.training.data.loader_config import DataLoaderParts

#: Maximum length of an epoch: 1 GB of indices. A longer epoch is probably endless.
_MAX_SAMPLES = 1 << 27
#: Number of batches whose samples are sorted together: more save padding, but make batches less random.
_BATCHES_PER_GROUP = 50


class LengthGroupedBatchSampler(Sampler[list[int]]):
    """Random batches of samples with similar lengths, which need little padding; each once per epoch."""

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        """Set up the groups.

        Args:
            lengths: length of each sample.
            batch_size: samples per batch; with the `Trainer`, of all ranks together.

        Raises:
            UserError: `batch_size` is less than 1.
        """
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}, but must be at least 1.")
        self._lengths, self._batch_size = torch.as_tensor(lengths), batch_size

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return -(-len(self._lengths) // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[torch.Tensor] = []
        for group in torch.split(torch.randperm(len(self._lengths)), self._batch_size * _BATCHES_PER_GROUP):
            # An unstable sort orders samples of equal length differently on other CPUs.
            order = self._lengths[group].argsort(descending=True, stable=True)
            batches += torch.split(group[order], self._batch_size)
        for number in torch.randperm(len(batches)).tolist():
            yield batches[number].tolist()


#: Samplers whose epochs have the same number of batches.
_CONSTANT_SAMPLERS = RandomSampler, SubsetRandomSampler, WeightedRandomSampler, LengthGroupedBatchSampler


@dataclass(frozen=True)
class DrawnEpoch:
    indices: torch.Tensor
    """All samples in order, as int64 of shape [n]."""
    ends: list[int]
    digest: str

    @cached_property
    def repeats(self) -> bool:
        return int(self.indices.bincount().max()) > 1

    def batch(self, number: int) -> torch.Tensor:
        return self.indices[self.ends[number - 1] if number else 0 : self.ends[number]]


class SamplerPlan:
    """Order of a run's samples by a sampler of the user, a pure function of the step."""

    def __init__(
        self, loader_parts: DataLoaderParts, batch_size: int, num_samples: int, seed: int, name: str
    ) -> None:
        self._parts, self._batch_size, self._num_samples = loader_parts, batch_size, num_samples
        self._seed = seed
        self._what = f"The {type(loader_parts.sampler).__name__} of {name}"
        self._drawn: dict[int, DrawnEpoch] = {}
        #: Last step of each epoch, as far as known.
        self._epoch_ends: list[int] = []
        first_epoch = self.draw(0)
        if self._draw(0).digest != first_epoch.digest:
            raise UserError(
                f"{self._what} returned two different orders for the same epoch and seed, so a resumed "
                "run could not reproduce the order. In the sampler, use only the global random "
                "generators or generators that are attributes of the sampler, because hpctrain seeds "
                "these. If the order depends on the epoch, define set_epoch(epoch)."
            )
        self._identity = {"sampler": type(loader_parts.sampler).__name__, "first_epoch": first_epoch.digest}
        self.max_batch_size = max(len(first_epoch.batch(i)) for i in range(len(first_epoch.ends)))

    def identity(self) -> dict[str, Any]:
        size = {} if self._parts.yields_batches else {"global_batch_size": self._batch_size}
        return {"seed": self._seed, "num_samples": self._num_samples, **size, **self._identity}

    def state_dict(self, step: int) -> dict[str, Any]:
        ends = [end for end in self._epoch_ends if end <= step]
        return {"epoch_ends": ends, "order": self.draw(len(ends)).digest if step not in ends else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch_ends = list(state["epoch_ends"])
        epoch = len(self._epoch_ends)
        if state["order"] is not None and self.draw(epoch).digest != state["order"]:
            raise UserError(
                f"{self._what} returned a different order for epoch {epoch} than before the stop, so the "
                "epoch cannot be continued. The order must depend only on the epoch and on "
                "torch's random state. Restore the previous sampler, or start a new run in a new folder."
            )

    def last_step(self, epochs: int) -> int | None:
        """Return the last step of training; None if epochs may have different lengths."""
        is_constant = type(self._parts.sampler) in _CONSTANT_SAMPLERS
        return len(self.draw(0).ends) * epochs if is_constant else None

    def epochs_completed(self, step: int) -> int:
        return bisect_right(self._epoch_ends, step)

    def seed_round(self, rank_batch: RankBatch) -> int:
        return -rank_batch.step if self.draw(rank_batch.epoch).repeats else rank_batch.epoch

    def rank_batch(self, step: int, data_rank: DataRank) -> RankBatch:
        epoch, number = self._locate(step)
        batch = self.draw(epoch).batch(number)
        low, high = data_rank.part(len(batch))
        return RankBatch(step, epoch, number, len(batch), data_rank.largest(len(batch)), batch[low:high], low)

    def draw(self, epoch: int) -> DrawnEpoch:
        if epoch not in self._drawn:
            self._drawn = {epoch - 1: self._drawn[epoch - 1]} if epoch - 1 in self._drawn else {}
            self._drawn[epoch] = self._draw(epoch)
        return self._drawn[epoch]

    def _locate(self, step: int) -> tuple[int, int]:
        while not self._epoch_ends or step > self._epoch_ends[-1]:
            start = self._epoch_ends[-1] if self._epoch_ends else 0
            self._epoch_ends.append(start + len(self.draw(len(self._epoch_ends)).ends))
        epoch = bisect_left(self._epoch_ends, step)
        return epoch, step - 1 - (self._epoch_ends[epoch - 1] if epoch else 0)

    def _draw(self, epoch: int) -> DrawnEpoch:
        sampler, ends = self._parts.sampler, array("q")
        assert sampler is not None
        seed = derive_seed(self._seed, "sampler", epoch)
        for nested in _nested_samplers(sampler):
            if callable(set_epoch := getattr(nested, "set_epoch", None)):
                set_epoch(epoch)
            for value in getattr(nested, "__dict__", {}).values():
                _reseed(value, seed)
        with seeded_rng(seed):
            indices = self._read(sampler, ends)
        if not self._parts.yields_batches:
            ends = array("q", range(self._batch_size, len(indices) + 1, self._batch_size))
            if len(indices) % self._batch_size and not self._parts.drop_last:
                ends.append(len(indices))
        if not ends:
            raise UserError(
                f"{self._what} returned too few samples for a batch in epoch {epoch}. Return more samples, "
                "or set a smaller batch size."
            )
        drawn = torch.frombuffer(indices, dtype=torch.int64)
        if not 0 <= int(drawn.min()) <= int(drawn.max()) < self._num_samples:
            raise UserError(
                f"{self._what} returned indices from {int(drawn.min())} to {int(drawn.max())}, but the "
                f"data set has {self._num_samples} samples. Return indices from 0 to "
                f"{self._num_samples - 1}."
            )
        digest = hashlib.blake2b(indices, digest_size=8)
        digest.update(ends)
        return DrawnEpoch(drawn, ends.tolist(), digest.hexdigest())

    def _read(self, sampler: Any, ends: array[int]) -> array[int]:
        indices = array("q")
        try:
            for batch in sampler if self._parts.yields_batches else [sampler]:
                before = len(indices)
                indices.extend(map(index, islice(batch, _MAX_SAMPLES + 1 - before)))
                if len(indices) > _MAX_SAMPLES:
                    raise UserError(
                        f"{self._what} returned more than {_MAX_SAMPLES} samples in an epoch. Limit the "
                        "number of samples per epoch."
                    )
                if len(indices) > before:
                    ends.append(len(indices))
        except TypeError as error:
            raise UserError(
                f"{self._what} must return {'lists of ' * self._parts.yields_batches}integers: {error}."
            ) from error
        return indices


def _nested_samplers(sampler: Any) -> Iterator[Any]:
    samplers = [sampler]
    for outer in samplers:
        yield outer
        for value in getattr(outer, "__dict__", {}).values():
            several = value if isinstance(value, list | tuple) else [value]
            samplers += [
                nested for nested in several if isinstance(nested, Sampler) and nested not in samplers
            ]


def _reseed(value: Any, seed: int) -> None:
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        value.manual_seed(seed)
    elif isinstance(value, random.Random):
        value.seed(seed)
    elif numpy and isinstance(value, numpy.random.Generator):
        value.bit_generator.state = type(value.bit_generator)(seed).state
    elif numpy and isinstance(value, numpy.random.RandomState):
        value.seed(seed % 2**32)
