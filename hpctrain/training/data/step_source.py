"""Give the training loop this rank's share of the global batch in each step."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from hpctrain.errors import UserError
from hpctrain.training.data.batch_plan import BatchPlan, DataRank, RankBatch
from hpctrain.training.data.fetcher import BatchOrder, make_fetcher
from hpctrain.training.data.loader_config import DataLoaderParts, LoaderConfig
from hpctrain.training.data.loader_workers import load_batches
from hpctrain.training.data.mixture import Mixture, MixtureOrder, contains_mixture
from hpctrain.training.data.sample_order import SampleOrder, SequentialOrder
from hpctrain.training.data.sampler_plan import SamplerPlan


@dataclass(frozen=True)
class StopCondition:
    """End of training: after `steps` steps or, if `steps` is None, after `epochs` epochs."""

    steps: int | None
    epochs: int | None = None


class MicroBatch(NamedTuple):
    batch: Any
    num_samples: int
    """Number of own samples; 0 if the rank has none left and uses a spare sample to match the other ranks."""


class StepData(NamedTuple):
    rank_batch: RankBatch
    num_micro_batches: int
    """Number of micro-batches, equal on all ranks, so that collectives in forward passes match."""
    micro_batches: Iterable[MicroBatch]


class StepSource(Protocol):
    """Source of steps; all methods are collective."""

    micro_batch_size: int | None = None
    """Maximum number of samples per forward pass of a rank; None for all samples. Set this before `steps`."""
    last_step: int | None
    """Last step of training; None if this step depends on the length of the data."""
    steps_per_epoch: int | None = None
    """Number of steps of an epoch; None if it is unknown."""
    exchanges_ends: bool = False
    """True if the ranks must exchange `local_ends` after every step."""
    loading: LoaderConfig
    remarks: Sequence[str] = ()

    def identity(self) -> dict[str, Any]: ...
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded step: plain values and tensors, equal on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore the result of `state_dict`; return messages on state that cannot be restored."""

    def begin(self, after: int) -> None: ...
    def steps(self) -> Iterator[StepData]: ...
    def close(self) -> None: ...

    def local_ends(self) -> float:
        """Return a number to sum over the ranks, together with the result of the last yielded step."""
        return 0.0

    def receive_ends(self, total: float) -> None:  # noqa: ARG002
        """Receive the sum of all ranks' `local_ends`, at most one step later."""
        return  # Otherwise, the method would be abstract.

    @property
    def at_epoch_end(self) -> bool:
        """Return true if the last yielded step is the last of its epoch; valid after `receive_ends`."""

    @property
    def finished(self) -> bool:
        """Return true if the last yielded step is the last of training; valid after `receive_ends`."""


class MapStepSource(StepSource):
    def __init__(
        self, loader_parts: DataLoaderParts, loading: LoaderConfig, data_rank: DataRank, until: StopCondition
    ) -> None:
        name = "train_dataset"
        self._fetcher = make_fetcher(
            loader_parts.dataset, loading.collate_fn, loading.seeds("training"), name
        )
        self._data_rank, self._until = data_rank, until
        batch_size, num_samples = loading.global_batch_size, self._fetcher.num_samples
        self._plan = _make_plan(loader_parts, loading, num_samples, name)
        if loader_parts.yields_batches:
            loading = loading.with_batches_of(self._plan.max_batch_size, name)
        elif batch_size > self._plan.max_batch_size:
            # Users relate learning rates and throughput to the batch size that they configured.
            problem = f"global_batch_size is {batch_size}, but train_dataset has only {num_samples} samples, "
            self.remarks = [f"{problem}so every step uses all samples."]
        self.loading = loading
        self.last_step = until.steps or self._plan.last_step(until.epochs or 0)
        self.steps_per_epoch = self._plan.last_step(1)
        self._step = 0
        self._batches: Generator[Any, None, None] | None = None

    def identity(self) -> dict[str, Any]:
        return self._plan.identity()

    def state_dict(self) -> dict[str, Any]:
        return self._plan.state_dict(self._step)

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        self._plan.load_state_dict(state)
        return []

    def begin(self, after: int) -> None:
        self._step = after

    def steps(self) -> Iterator[StepData]:
        coming: deque[tuple[RankBatch, list[tuple[int, int]]]] = deque()

        def orders() -> Iterator[BatchOrder]:
            for step in itertools.count(self._step + 1):
                if self._is_last(step - 1):
                    return
                rank_batch = self._plan.rank_batch(step, self._data_rank)
                ranges = rank_batch.parts(self.micro_batch_size, self._data_rank.grain_size)
                coming.append((rank_batch, ranges))
                for low, high in ranges:
                    indices = rank_batch.indices[low:high] if low < high else self._padding_sample(step)
                    yield self._plan.seed_round(rank_batch), indices

        def several(ranges: list[tuple[int, int]], first_batch: Any) -> Iterator[MicroBatch]:
            yield MicroBatch(first_batch, ranges[0][1] - ranges[0][0])
            for low, high in ranges[1:]:
                yield MicroBatch(next(batches), high - low)

        is_divided = self._data_rank.world_size > 1 or self.micro_batch_size is not None
        self._fetcher.refuses_none = is_divided or self._data_rank.grain_size is not None
        self._batches = batches = load_batches(self.loading, self._fetcher, orders(), "train_dataset")
        for first_batch in batches:
            rank_batch, ranges = coming.popleft()
            self._step = rank_batch.step
            if len(ranges) == 1:
                yield StepData(rank_batch, 1, (MicroBatch(first_batch, ranges[0][1]),))
            else:
                yield StepData(rank_batch, len(ranges), several(ranges, first_batch))

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()

    def grain(self, step: int, number: int) -> MicroBatch:
        all_ranks = DataRank(0, 1, self._data_rank.grain_size)
        rank_batch = self._plan.rank_batch(step, all_ranks)
        low, high = rank_batch.parts(None, all_ranks.grain_size)[number]
        indices, threads = rank_batch.indices[low:high], torch.get_num_threads()
        if self.loading.num_workers:
            torch.set_num_threads(1)  # as in torch's data workers
        try:
            return MicroBatch(self._fetcher.fetch(self._plan.seed_round(rank_batch), indices), high - low)
        finally:
            torch.set_num_threads(threads)

    @property
    def at_epoch_end(self) -> bool:
        completed = self._plan.epochs_completed
        return self._step == 0 or completed(self._step) > completed(self._step - 1)

    @property
    def finished(self) -> bool:
        return self._is_last(self._step)

    def _padding_sample(self, step: int) -> torch.Tensor:
        """Return a sample or grain of the batch, for a rank without samples in `step`."""
        main_rank = replace(self._data_rank, rank=0)
        return self._plan.rank_batch(step, main_rank).indices[: main_rank.grain_size or 1]

    def _is_last(self, step: int) -> bool:
        if self.last_step is not None:
            return step >= self.last_step
        return self._plan.epochs_completed(step) >= (self._until.epochs or 0)


def _make_plan(
    loader_parts: DataLoaderParts, loading: LoaderConfig, num_samples: int, name: str
) -> BatchPlan | SamplerPlan:
    batch_size, seed = loading.global_batch_size, loading.seed
    if contains_mixture(loader_parts.dataset):
        raise UserError(
            f"{name} is of type {type(loader_parts.dataset).__name__} and contains a Mixture, whose weights "
            "would be ignored. Pass a single Mixture, which may contain subsets."
        )
    if isinstance(loader_parts.dataset, Mixture):
        if loader_parts.sampler is not None:
            raise UserError(
                f"{name} is a Mixture, whose weights determine the order, but its DataLoader has the "
                f"sampler {type(loader_parts.sampler).__name__}. Remove this sampler."
            )
        return BatchPlan(MixtureOrder(loader_parts.dataset, batch_size, seed), batch_size)
    if loader_parts.sampler is not None:
        return SamplerPlan(loader_parts, batch_size, num_samples, seed, name)
    if loader_parts.drop_last and num_samples < batch_size:
        raise UserError(
            f"{name} has {num_samples} samples, but the batch size is {batch_size} and drop_last is True, so "
            "there is no complete batch. Set a smaller batch size, or remove drop_last."
        )
    order = (SampleOrder if loader_parts.shuffle else SequentialOrder)(num_samples, seed)
    return BatchPlan(order, batch_size, loader_parts.drop_last)
