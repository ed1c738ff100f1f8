"""The batch sampler under torch's DataLoader and torchdata's StatefulDataLoader."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from hpctrain import StatefulBatchSampler, UserError

NUM_SAMPLES, BATCH = 50, 8
LOADERS = [
    pytest.param({}, id="no workers"),
    pytest.param({"num_workers": 2}, id="workers", marks=pytest.mark.slow),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="persistent", marks=pytest.mark.extended),
]


def sampler(rank: int = 0, world_size: int = 1, seed: int = 3) -> StatefulBatchSampler:
    return StatefulBatchSampler(range(NUM_SAMPLES), BATCH, seed=seed, rank=rank, num_replicas=world_size)


def epochs(loader, number: int = 2) -> list[list[int]]:
    return [batch.tolist() for _ in range(number) for batch in loader]


def global_batches(world_size: int) -> list[set[int]]:
    ranks = [sampler(rank, world_size) for rank in range(world_size)]
    steps = []
    for _ in range(2 * len(ranks[0])):
        parts = [next(iter(each)) for each in ranks]
        counted = [part for each, part in zip(ranks, parts, strict=True) if each.weight]
        steps.append(set(itertools.chain(*counted)))
    return steps


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_samples_and_batches_are_the_same_on_any_number_of_ranks(world_size):
    steps = global_batches(world_size)
    assert steps == global_batches(1)
    for epoch in (steps[:7], steps[7:]):
        assert sorted(itertools.chain(*epoch)) == list(range(NUM_SAMPLES))
    assert steps[:7] != steps[7:]


@pytest.mark.parametrize("options", LOADERS)
@pytest.mark.parametrize("trained", [3, 7])
def test_position_counts_yielded_batches(options, trained):
    undisturbed = epochs(DataLoader(range(NUM_SAMPLES), batch_sampler=sampler(), **options))
    first = sampler()
    loader = DataLoader(range(NUM_SAMPLES), batch_sampler=first, **options)
    batches = itertools.chain.from_iterable(loader for _ in range(2))
    seen = [next(batches).tolist() for _ in range(trained)]
    assert (first.step, first.epoch) == (trained, trained // 7)
    second = sampler()
    second.load_state_dict(first.state_dict())
    rest = DataLoader(range(NUM_SAMPLES), batch_sampler=second, **options)
    seen += [batch.tolist() for _ in range(second.epoch, 2) for batch in rest]
    assert seen == undisturbed


@pytest.mark.parametrize("options", LOADERS)
@pytest.mark.parametrize("trained", [3, 7])
@pytest.mark.parametrize("source", ["loader", "sampler"])
def test_stateful_data_loader_resumes(options, trained, source):
    undisturbed = epochs(DataLoader(range(NUM_SAMPLES), batch_sampler=sampler()))
    first = sampler()
    loader = StatefulDataLoader(range(NUM_SAMPLES), batch_sampler=first, **options)
    batches = itertools.chain.from_iterable(loader for _ in range(2))
    seen = [next(batches).tolist() for _ in range(trained)]
    assert first.step == trained
    second = sampler()
    rest = StatefulDataLoader(range(NUM_SAMPLES), batch_sampler=second, **options)
    if source == "loader":
        rest.load_state_dict(loader.state_dict())
    else:
        second.load_state_dict(first.state_dict())
    batches = itertools.chain.from_iterable(rest for _ in range(3))
    for step in range(trained, 14):
        seen.append(next(batches).tolist())
        assert second.step == step + 1
    assert seen == undisturbed


@pytest.mark.parametrize("options", LOADERS)
def test_random_numbers_do_not_depend_on_where_an_epoch_is_entered(options):
    def draws(at: int | None) -> list[float]:
        """Draw in each step; at a step, continue with a new sampler and loader as after a restart."""
        torch.manual_seed(1)
        now, drawn = sampler(), []
        loader = DataLoader(range(NUM_SAMPLES), batch_sampler=now, **options)
        while now.step < 14:
            for _ in loader:
                drawn.append(torch.rand(()).item())
                if now.step == at:
                    state, generator = now.state_dict(), torch.get_rng_state()
                    now = sampler()
                    now.load_state_dict(state)
                    torch.set_rng_state(generator)
                    loader = DataLoader(range(NUM_SAMPLES), batch_sampler=now, **options)
                    break
        return drawn

    assert draws(None) == draws(3) == draws(7)


def test_weights_of_a_batch_add_up_to_the_number_of_ranks():
    ranks = [sampler(rank, 3) for rank in range(3)]
    for each in ranks:
        list(each)
    # The last batch has two samples.
    assert [each.weight for each in ranks] == [1.5, 1.5, 0.0]


def test_set_epoch_keeps_the_position_in_the_present_epoch():
    now = sampler()
    next(iter(now))
    now.set_epoch(0)
    assert now.step == 1
    now.set_epoch(2)
    assert (now.step, now.epoch) == (14, 2)


def test_state_of_another_order_is_refused():
    with pytest.raises(UserError, match=r"'seed': 4.*'seed': 3"):
        sampler().load_state_dict(sampler(seed=4).state_dict())


def test_unshuffled_order_has_no_short_batches():
    now = StatefulBatchSampler(
        range(NUM_SAMPLES), BATCH, shuffle=False, drop_last=True, rank=1, num_replicas=2
    )
    assert list(now) == [list(range(start + 4, start + 8)) for start in range(0, 48, 8)]
    assert (len(now), now.epoch) == (6, 1)


def test_batches_smaller_than_the_number_of_ranks_are_refused():
    with pytest.raises(UserError, match="global_batch_size is 8, but there are 9 ranks"):
        sampler(0, 9)
