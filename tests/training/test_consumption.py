"""Which samples are trained in which step, on any ranks, through any stops; the ranks are threads here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from helpers.iterable_datasets import PlainDataset, ShardedDataset, StatefulDataset, StatefulIteratorDataset
from helpers.simulated_ranks import TrainedSteps, train_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

import hpctrain
from hpctrain.training.data.dataset_adapters import make_step_source
from hpctrain.training.data.interleaved_reader import ShardedStream
from hpctrain.training.data.loader_config import LoaderConfig
from hpctrain.training.data.step_source import StopCondition
from hpctrain.training.data.stream_order import (
    UNKNOWN_LENGTH,
    StreamCursor,
    list_rank_shards,
    next_batch,
    owner_rank,
)

#: Stop after so many steps, and go on with so many ranks and workers.
LEGS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8)), min_size=1, max_size=5)


class Numbers(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def maker(make_dataset: Any, batch: int, until: StopCondition, num_workers: int = 0):
    loading = LoaderConfig(5, batch, num_workers=num_workers, seed_samples=False, collate_fn=list)

    def make(deal: Any, team: Any) -> Any:
        return make_step_source(make_dataset(), loading, deal, team, until)

    return make


def train_legs(make: Any, legs: list[tuple[int, int]], micro: int | None = None) -> list[TrainedSteps]:
    """One leg after the other, each from the state of the one before, and one to the end."""
    done: list[TrainedSteps] = []
    step, state = 0, None
    for num_steps, world_size in [*legs, (10**6, 1)]:
        leg = train_steps(make, world_size, num_steps, after=step, state=state, micro_batch_size=micro)
        done.append(leg)
        step, state = step + len(leg.steps), leg.state
        if leg.finished:
            break
    return done


def consumed(legs: list[TrainedSteps]) -> list[tuple[Any, ...]]:
    """Of each step: its number, epoch, batch, whether it ends the epoch, and its samples without order."""
    return [
        (
            step["step"], step["epoch"], step["batch_idx"], step["ends_epoch"],
            sorted(map(str, chain(*step["indices"]))),
        )
        for leg in legs
        for step in leg.steps
    ]  # fmt: skip


def assert_every_epoch_is_whole(steps: list[tuple[Any, ...]], sizes: dict[int, int], batch: int) -> None:
    seen: dict[int, Counter[str]] = {}
    for _, epoch, _, _, samples in steps:
        seen.setdefault(epoch, Counter()).update(samples)
    assert {epoch: len(counts) for epoch, counts in seen.items()} == sizes
    assert all(count == 1 for counts in seen.values() for count in counts.values())
    for _, _, _, ends_epoch, samples in steps:
        assert len(samples) == batch or ends_epoch


@given(st.integers(1, 60), st.integers(1, 16), LEGS, st.sampled_from([None, 1, 3]))
@settings(max_examples=40, deadline=None)
def test_of_a_data_set_every_sample_is_trained_once_an_epoch_through_all_stops(size, batch, legs, micro):
    make = maker(lambda: Numbers(size), batch, StopCondition(None, 3))
    steps = consumed(train_legs(make, legs, micro))
    assert steps == consumed([train_steps(make, 1, 10**6)])
    assert_every_epoch_is_whole(steps, dict.fromkeys(range(3), size), batch)


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any),
    st.integers(1, 16),
    LEGS,
    st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_of_a_stream_every_sample_is_trained_once_an_epoch_through_all_stops(lengths, batch, legs, per_epoch):
    make = maker(lambda: ShardedDataset(lengths, per_epoch=per_epoch), batch, StopCondition(None, 3))
    steps = consumed(train_legs(make, legs))
    assert steps == consumed([train_steps(make, 1, 10**6)])
    sizes = {e: sum(lengths) + e * per_epoch * len(lengths) for e in range(3)}
    assert_every_epoch_is_whole(steps, sizes, batch)


@pytest.mark.long
@pytest.mark.timeout(600)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any),
    st.integers(1, 60),
    st.integers(1, 16),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8), st.integers(0, 3)), min_size=1, max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_with_any_number_of_workers_in_each_leg_the_samples_are_the_same(lengths, size, batch, legs):
    """Legs with workers have one rank here, for ranks are threads, which had better not fork at once."""
    for make_dataset, sizes in (
        (lambda: ShardedDataset(lengths), sum(lengths)),
        (lambda: Numbers(size), size),
    ):
        whole = consumed([train_steps(maker(make_dataset, batch, StopCondition(None, 2)), 1, 10**6)])
        done: list[TrainedSteps] = []
        step, state = 0, None
        for num_steps, world_size, num_workers in [*legs, (10**6, 1, 1)]:
            make = maker(make_dataset, batch, StopCondition(None, 2), num_workers)
            leg = train_steps(make, world_size if num_workers == 0 else 1, num_steps, after=step, state=state)
            done.append(leg)
            step, state = step + len(leg.steps), leg.state
            if leg.finished:
                break
        assert consumed(done) == whole
        assert_every_epoch_is_whole(consumed(done), dict.fromkeys(range(2), sizes), batch)


@pytest.mark.parametrize("dataset", [lambda: StatefulDataset(37), lambda: StatefulIteratorDataset(37)])
def test_a_stream_without_shards_is_shared_by_all_ranks(dataset):
    make = maker(dataset, 8, StopCondition(12))
    whole = consumed([train_steps(make, 1, 100)])
    assert consumed(train_legs(make, [(3, 3), (4, 2), (1, 5)])) == whole
    assert [len(samples) for *_, samples in whole] == [8, 8, 8, 8, 5, 8, 8, 8, 8, 5, 8, 8]


def test_a_stream_without_a_state_says_how_many_samples_are_trained_again():
    make = maker(lambda: PlainDataset(37), 8, StopCondition(12))
    first = train_steps(make, 2, 7)
    second = train_steps(make, 3, 100, after=7, state=first.state)
    (remark,) = second.remarks
    assert remark.startswith("train_dataset has no state_dict and load_state_dict")
    assert remark.endswith("epoch 1 starts over and repeats 16 samples.")
    assert [(step["step"], step["epoch"], step["batch_idx"]) for step in second.steps] == [
        (8, 1, 0), (9, 1, 1), (10, 1, 2), (11, 1, 3), (12, 1, 4),
    ]  # fmt: skip
    # At an epoch's end there is nothing to say.
    assert train_steps(make, 1, 1, after=5, state=train_steps(make, 2, 5).state).remarks == []


def test_ranks_stop_to_exchange_ends_only_where_a_shard_ends():
    make = maker(lambda: ShardedDataset([200, 200, 200]), 12, StopCondition(None, 1))
    leg = train_steps(make, 4, 10**6)
    assert len(leg.steps) == 50
    assert sum(step["collectives"] > 0 for step in leg.steps) == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_read_the_same_stream(num_workers):
    lengths = [9, 2, 0, 14, 5]
    whole = consumed(
        [train_steps(maker(lambda: ShardedDataset(lengths), 4, StopCondition(None, 2)), 1, 10**6)]
    )
    make = maker(lambda: ShardedDataset(lengths), 4, StopCondition(None, 2), num_workers)
    assert consumed(train_legs(make, [(4, 1)])) == whole


def test_workers_do_not_split_a_stream_that_would_split_itself():
    make = maker(lambda: PlainDataset(20), 4, StopCondition(None, 1), num_workers=2)
    alone = maker(lambda: PlainDataset(20), 4, StopCondition(None, 1))
    assert consumed([train_steps(make, 1, 100)]) == consumed([train_steps(alone, 1, 100)])


def test_parts_of_micro_batches_are_as_many_on_every_rank_and_small_enough():
    make = maker(lambda: Numbers(23), 10, StopCondition(None, 1))
    leg = train_steps(make, 3, 100, micro_batch_size=2)
    for step in leg.steps:
        for micro, indices in zip(step["micro"], step["indices"], strict=True):
            assert sum(count for count, _ in micro) == len(indices)
            assert all(count <= 2 and len(batch) == max(count, 1) for count, batch in micro)
    assert {len(step["micro"][0]) for step in leg.steps} == {2, 1}


@pytest.mark.parametrize(
    "dataset", [lambda: Numbers(3), lambda: StatefulDataset(3), lambda: ShardedDataset([1, 0, 0, 2])]
)
def test_a_rank_without_samples_goes_through_the_motions(dataset):
    leg = train_steps(maker(dataset, 8, StopCondition(2)), 5, 10)
    assert len(leg.steps) == 2
    for step in leg.steps:
        assert sum(len(indices) for indices in step["indices"]) == 3
        assert all(len(batch) >= 1 for micro in step["micro"] for _, batch in micro)


def test_a_stream_without_samples_is_an_error_and_not_an_endless_loop():
    with pytest.raises(hpctrain.UserError, match="no samples in epoch 0"):
        train_steps(maker(lambda: ShardedDataset([0, 0]), 4, StopCondition(None, 2)), 2, 10)


# The pure functions.


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.integers(1, 30),
    st.integers(0, 11),
    st.integers(0, 10),
)
@settings(max_examples=200, deadline=None)
def test_batches_go_round_the_shards_and_leave_out_what_has_ended(lengths, count, shard, round_):
    plain = sorted((k, s) for s, length in enumerate(lengths) for k in range(length))
    cursor = StreamCursor(0, 0, round_, shard)
    expected = [(s, k) for k, s in plain if (k, s) >= (round_, shard)]
    got: list[tuple[int, int]] = []
    while (batch := next_batch(torch.tensor(lengths), cursor, count)) is not None:
        assert len(batch.picks) == min(count, len(expected) - len(got))
        got += [tuple(pick) for pick in batch.picks.tolist()]
        cursor = batch.after
        passed = Counter(s for k, s in plain if (k, s) < (cursor.round, cursor.shard))
        assert cursor.taken(torch.tensor(lengths)).tolist() == [passed[s] for s in range(len(lengths))]
    assert got == expected


@given(st.integers(1, 20), st.integers(1, 20))
def test_every_sample_has_one_reader_and_readers_share_evenly(num_shards, world_size):
    counts = Counter(
        owner_rank(shard, number, num_shards, world_size)
        for shard in range(num_shards)
        for number in range(60)
    )
    assert set(counts) == set(range(world_size))
    assert max(counts.values()) <= 60 * -(-num_shards // world_size)
    for rank in range(world_size):
        own = {
            s
            for s in range(num_shards)
            for k in range(60)
            if owner_rank(s, k, num_shards, world_size) == rank
        }
        assert own == set(list_rank_shards(rank, num_shards, world_size))


def test_a_step_of_a_stream_is_planned_fast_however_large_it_is():
    lengths = torch.full((1024,), UNKNOWN_LENGTH)
    batch = next_batch(lengths, StreamCursor(0, 3, 10**9, 7), 4096)
    assert batch is not None
    assert batch.picks[0].tolist() == [7, 10**9]
    assert batch.after == replace(batch.after, round=10**9 + 4, shard=7)


def test_a_stream_whose_num_shards_is_not_for_us_is_one_shard():
    class Own(IterableDataset):
        num_shards = 4

        def __iter__(self):
            return iter(range(8))

    stream = ShardedStream(Own(), "train_dataset")
    assert stream.num_shards == 1
    assert list(stream.shard(0)) == list(range(8))
