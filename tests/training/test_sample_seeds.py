"""Random draws of a dataset depend on the sample, not on the worker, the rank or the attempt."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers.iterable_datasets import ShardedDataset
from helpers.simulated_ranks import ALONE, train_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

import hpctrain
from hpctrain.training.base import rng
from hpctrain.training.data.dataset_adapters import make_step_source
from hpctrain.training.data.fetcher import make_fetcher
from hpctrain.training.data.loader_config import LoaderConfig
from hpctrain.training.data.sample_seeds import SampleSeeds
from hpctrain.training.data.step_source import StopCondition

DRAWS = {
    "torch's global generator": lambda: float(torch.rand(())),
    "python's global generator": lambda: random.random(),
    "numpy's global generator": lambda: float(np.random.rand()),
    "torch's generator of the sample": lambda: float(
        torch.rand((), generator=hpctrain.sample_generator("torch"))
    ),
    "python's generator of the sample": lambda: hpctrain.sample_generator("python").random(),
    "numpy's generator of the sample": lambda: float(hpctrain.sample_generator("numpy").random()),
}


class Noisy(Dataset):
    """A sample is its index and its random draw."""

    def __init__(self, draw: Any, length: int = 24) -> None:
        self.draw, self.length = draw, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, self.draw()


class NoisyItems(Noisy):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [(i, float(hpctrain.sample_generator("numpy", index=i).random())) for i in indices]


class NoisyStream(ShardedDataset):
    draw: Any = None

    def __iter__(self):
        for pair in super().__iter__():
            yield (*pair.tolist(), self.draw())

    def shard(self, num_shards, index):
        part = super().shard(num_shards, index)
        part.draw = self.draw
        return part


def trained_samples(dataset: Any, segments: list[tuple[int, int, int]], seed: int = 1) -> list[Any]:
    """Return the samples of two epochs, sorted, trained in segments of (steps, ranks, workers)."""
    stop_condition, step, state, samples = StopCondition(None, 2), 0, None, []
    for num_steps, world_size, num_workers in [*segments, (100, 1, 0)]:
        config = LoaderConfig(seed, 5, num_workers, collate_fn=list)

        def make(data_rank, group, config=config):
            return make_step_source(dataset, config, data_rank, group, stop_condition)

        if world_size > 1:
            # Ranks are threads of one process here, which share one set of global generators.
            pieces = [samples_of_rank(make, rank, world_size, step, num_steps) for rank in range(world_size)]
            samples += [sample for part in pieces for sample in part]
            step += num_steps
            continue
        segment = train_steps(make, 1, num_steps, after=step, state=state)
        samples += [
            (step_["epoch"], sample)
            for step_ in segment.steps
            for _, batch in step_["micro"][0]
            for sample in batch
        ]
        step, state = step + len(segment.steps), segment.state
    return sorted(samples)


def samples_of_rank(make: Any, rank: int, world_size: int, step: int, num_steps: int) -> list[Any]:
    from hpctrain.training.data.batch_plan import DataRank

    source = make(DataRank(rank, world_size), ALONE)
    source.begin(step)
    samples = []
    try:
        for _, step_data in zip(range(num_steps), source.steps(), strict=False):
            samples += [
                (step_data.rank_batch.epoch, sample)
                for micro in step_data.micro_batches
                for sample in micro.batch[: micro.num_samples]
            ]
    finally:
        source.close()
    return samples


@pytest.mark.slow
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_depend_on_seed_epoch_and_index_only(draw):
    uninterrupted = trained_samples(Noisy(draw), [])
    assert trained_samples(Noisy(draw), [(2, 3, 0), (1, 1, 2), (3, 4, 1)]) == uninterrupted
    drawn = [value for _, (_, value) in uninterrupted]
    assert len(set(drawn)) == len(drawn) == 48  # every epoch and every sample differs
    assert trained_samples(Noisy(draw), [], seed=2) != uninterrupted


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.just(0)), max_size=4))
@settings(max_examples=25, deadline=None)
def test_draws_are_the_same_through_stops_and_world_sizes(segments):
    draw = DRAWS["torch's global generator"]
    assert trained_samples(Noisy(draw), segments[:2]) == trained_samples(Noisy(draw), [])


def test_samples_of_getitems_have_their_own_generators():
    dataset = NoisyItems(None)
    uninterrupted = trained_samples(dataset, [])
    assert trained_samples(dataset, [(2, 3, 0), (1, 1, 2)]) == uninterrupted
    drawn = [value for _, (_, value) in uninterrupted]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("name", ["torch's global generator", "numpy's generator of the sample"])
def test_draws_of_a_stream_depend_on_the_sample_only(name):
    dataset = NoisyStream([7, 3, 9])
    dataset.draw = DRAWS[name]
    uninterrupted = trained_samples(dataset, [])
    assert trained_samples(dataset, [(2, 1, 2), (2, 1, 0), (1, 1, 1)]) == uninterrupted
    assert len({sample[2] for _, sample in uninterrupted}) == 38


def test_generators_of_the_rank_are_not_affected():
    rng.seed_all(3)
    before = rng.capture_rng_state()
    trained_samples(Noisy(DRAWS["numpy's global generator"]), [(1, 1, 1)])
    after = rng.capture_rng_state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_draws_of_collate_fn_depend_on_its_samples_only():
    def noisy(samples: list[float]) -> torch.Tensor:
        return torch.tensor(samples) + torch.rand(len(samples))

    data = [float(i) for i in range(8)]
    seeds = SampleSeeds(1, "training")
    fetched = []
    for num_earlier in (0, 3):
        fetcher = make_fetcher(data, noisy, seeds, "train_dataset")
        for _ in range(num_earlier):
            fetcher.fetch(0, torch.tensor([1, 2]))
        rank_state = torch.get_rng_state()
        fetched.append(fetcher.fetch(0, torch.tensor([5, 6])))
        assert torch.equal(torch.get_rng_state(), rank_state)
    assert torch.equal(*fetched)


def test_sample_generator_works_outside_of_training():
    torch.manual_seed(1)
    assert hpctrain.sample_generator("python").random() != hpctrain.sample_generator("python").random()


def test_invalid_uses_are_refused():
    with pytest.raises(hpctrain.UserError, match="kind must be 'torch', 'numpy' or 'python'"):
        hpctrain.sample_generator("jax")

    class Forgetful(Noisy):
        def __getitems__(self, indices):
            return [hpctrain.sample_generator() for _ in indices]

    with pytest.raises(hpctrain.UserError, match=r"index=None, .* 5 samples"):
        trained_samples(Forgetful(None), [])
