"""What a data set draws belongs to the sample: not to a worker, a rank, or a start of the run."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers.iterable_datasets import ShardedDataset
from helpers.simulated_ranks import ALONE, train_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset

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
    """A sample is its index and what was drawn for it."""

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


def samples_of(dataset: Any, legs: list[tuple[int, int, int]], seed: int = 1) -> list[Any]:
    """What was trained in two epochs, in legs of (steps, ranks, workers), sorted by epoch and sample."""
    until, step, state, seen = StopCondition(None, 2), 0, None, []
    for num_steps, world_size, num_workers in [*legs, (100, 1, 0)]:
        loading = LoaderConfig(seed, 5, num_workers, collate_fn=list)

        def make(deal, team, loading=loading):
            return make_step_source(dataset, loading, deal, team, until)

        if world_size > 1:
            # Ranks are threads of one process here, which has one set of global generators.
            pieces = [ranked(make, rank, world_size, step, num_steps) for rank in range(world_size)]
            seen += [sample for piece in pieces for sample in piece]
            step += num_steps
            continue
        leg = train_steps(make, 1, num_steps, after=step, state=state)
        seen += [
            (one["epoch"], sample) for one in leg.steps for _, batch in one["micro"][0] for sample in batch
        ]
        step, state = step + len(leg.steps), leg.state
    return sorted(seen)


def ranked(make: Any, rank: int, world_size: int, step: int, num_steps: int) -> list[Any]:
    from hpctrain.training.data.batch_plan import DataRank

    feed = make(DataRank(rank, world_size), ALONE)
    feed.begin(step)
    seen = []
    try:
        for _, one in zip(range(num_steps), feed.steps(), strict=False):
            seen += [
                (one.rank_batch.epoch, sample)
                for micro in one.micro_batches
                for sample in micro.batch[: micro.num_samples]
            ]
    finally:
        feed.close()
    return seen


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_depend_on_seed_epoch_and_index_alone(draw):
    whole = samples_of(Noisy(draw), [])
    assert samples_of(Noisy(draw), [(2, 3, 0), (1, 1, 2), (3, 4, 1)]) == whole
    drawn = [value for _, (_, value) in whole]
    assert len(set(drawn)) == len(drawn) == 48  # every epoch and every sample differs
    assert samples_of(Noisy(draw), [], seed=2) != whole


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.just(0)), max_size=4))
@settings(max_examples=25, deadline=None)
def test_draws_are_the_same_through_any_stops_and_world_sizes(legs):
    draw = DRAWS["torch's global generator"]
    assert samples_of(Noisy(draw), legs[:2]) == samples_of(Noisy(draw), [])


def test_several_samples_at_once_have_a_generator_each():
    dataset = NoisyItems(None)
    whole = samples_of(dataset, [])
    assert samples_of(dataset, [(2, 3, 0), (1, 1, 2)]) == whole
    drawn = [value for _, (_, value) in whole]
    assert len(set(drawn)) == len(drawn)


def test_a_subset_does_not_hide_the_samples():
    dataset = Subset(Noisy(DRAWS["torch's generator of the sample"]), list(range(3, 20)))
    assert samples_of(dataset, [(3, 2, 0), (1, 1, 2)]) == samples_of(dataset, [])


@pytest.mark.parametrize("name", ["torch's global generator", "numpy's generator of the sample"])
def test_draws_of_a_stream_depend_on_the_sample_alone(name):
    dataset = NoisyStream([7, 3, 9])
    dataset.draw = DRAWS[name]
    whole = samples_of(dataset, [])
    assert samples_of(dataset, [(2, 1, 2), (2, 1, 0), (1, 1, 1)]) == whole
    assert len({sample[2] for _, sample in whole}) == 38


def test_the_rank_s_own_generators_are_not_disturbed():
    rng.seed_all(3)
    before = rng.capture_rng_state()
    samples_of(Noisy(DRAWS["numpy's global generator"]), [(1, 1, 1)])
    after = rng.capture_rng_state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_a_collate_function_draws_depends_on_its_samples_and_not_on_what_was_fetched_before():
    def noisy(samples: list[float]) -> torch.Tensor:
        return torch.tensor(samples) + torch.rand(len(samples))

    data = [float(i) for i in range(8)]
    seeds = SampleSeeds(1, "training")
    fetched = []
    for before in (0, 3):
        fetcher = make_fetcher(data, noisy, seeds, "train_dataset")
        for _ in range(before):
            fetcher.fetch(0, torch.tensor([1, 2]))
        own = torch.get_rng_state()
        fetched.append(fetcher.fetch(0, torch.tensor([5, 6])))
        assert torch.equal(torch.get_rng_state(), own)
    assert torch.equal(*fetched)


def test_outside_of_a_training_a_generator_is_there_too():
    torch.manual_seed(1)
    assert hpctrain.sample_generator("python").random() != hpctrain.sample_generator("python").random()


def test_wrong_uses_are_refused_in_words():
    with pytest.raises(hpctrain.UserError, match="choose from 'torch', 'numpy' and 'python'"):
        hpctrain.sample_generator("jax")

    class Forgetful(Noisy):
        def __getitems__(self, indices):
            return [hpctrain.sample_generator() for _ in indices]

    with pytest.raises(hpctrain.UserError, match=r"index=None\).* 5 samples"):
        samples_of(Forgetful(None), [])
