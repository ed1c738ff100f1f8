"""Samples of each step, on any number of ranks and through any stops; ranks are threads here."""

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from helpers.iterable_datasets import PlainDataset, ShardedDataset, StatefulDataset, StatefulIteratorDataset
from helpers.simulated_ranks import TrainedSteps, train_steps
from hypothesis import given, settings
from hypothesis import strategies as st

import hpctrain
from hpctrain.errors import UserError
from hpctrain.training.data.dataset_adapters import make_step_source
from hpctrain.training.data.loader_config import LoaderConfig
from hpctrain.training.data.step_source import StopCondition

#: Numbers of steps until a stop, and of ranks.
SEGMENTS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8)), min_size=1, max_size=5)


def source_maker(make_dataset: Any, batch: int, stop_condition: StopCondition, num_workers: int = 0):
    loader_config = LoaderConfig(5, batch, num_workers=num_workers, seed_samples=False, collate_fn=list)

    def make(data_rank: Any, group: Any) -> Any:
        return make_step_source(make_dataset(), loader_config, data_rank, group, stop_condition)

    return make


def train_segments(
    make: Any, segments: list[tuple[int, int]], micro: int | None = None
) -> list[TrainedSteps]:
    """Train segment after segment, each from the previous one's state, and one to the end."""
    trained: list[TrainedSteps] = []
    step, state = 0, None
    for num_steps, world_size in [*segments, (10**6, 1)]:
        segment = train_steps(make, world_size, num_steps, after=step, state=state, micro_batch_size=micro)
        trained.append(segment)
        step, state = step + len(segment.steps), segment.state
        if segment.finished:
            break
    return trained


def consumed_samples(segments: list[TrainedSteps]) -> list[tuple[Any, ...]]:
    """Return for each step: number, epoch, batch, whether it ends the epoch, and its sorted samples."""
    return [
        (
            step["step"], step["epoch"], step["batch_idx"], step["ends_epoch"],
            sorted(map(str, chain(*step["indices"]))),
        )
        for segment in segments
        for step in segment.steps
    ]  # fmt: skip


def assert_every_epoch_is_complete(steps: list[tuple[Any, ...]], sizes: dict[int, int], batch: int) -> None:
    seen: dict[int, Counter[str]] = {}
    for _, epoch, _, _, samples in steps:
        seen.setdefault(epoch, Counter()).update(samples)
    assert {epoch: len(counts) for epoch, counts in seen.items()} == sizes
    assert all(count == 1 for counts in seen.values() for count in counts.values())
    for _, _, _, ends_epoch, samples in steps:
        assert len(samples) == batch or ends_epoch


@pytest.mark.slow
@given(st.integers(1, 60), st.integers(1, 16), SEGMENTS, st.sampled_from([None, 1, 3]))
@settings(max_examples=40, deadline=None)
def test_every_sample_of_a_dataset_is_trained_once_per_epoch_through_stops(size, batch, segments, micro):
    make = source_maker(lambda: range(size), batch, StopCondition(None, 3))
    steps = consumed_samples(train_segments(make, segments, micro))
    assert steps == consumed_samples([train_steps(make, 1, 10**6)])
    assert_every_epoch_is_complete(steps, dict.fromkeys(range(3), size), batch)


@pytest.mark.extended
@pytest.mark.slow
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any),
    st.integers(1, 16),
    SEGMENTS,
    st.integers(0, 2),
)
@settings(max_examples=20, deadline=None)
def test_every_sample_of_a_stream_is_trained_once_per_epoch_through_stops(
    lengths, batch, segments, per_epoch
):
    make = source_maker(lambda: ShardedDataset(lengths, per_epoch=per_epoch), batch, StopCondition(None, 3))
    steps = consumed_samples(train_segments(make, segments))
    assert steps == consumed_samples([train_steps(make, 1, 10**6)])
    sizes = {e: sum(lengths) + e * per_epoch * len(lengths) for e in range(3)}
    assert_every_epoch_is_complete(steps, sizes, batch)


@pytest.mark.parametrize("dataset", [lambda: StatefulDataset(37), lambda: StatefulIteratorDataset(37)])
def test_stream_without_shards_is_shared_by_all_ranks(dataset):
    make = source_maker(dataset, 8, StopCondition(12))
    uninterrupted = consumed_samples([train_steps(make, 1, 100)])
    assert consumed_samples(train_segments(make, [(3, 3), (4, 2), (1, 5)])) == uninterrupted
    assert [len(samples) for *_, samples in uninterrupted] == [8, 8, 8, 8, 5, 8, 8, 8, 8, 5, 8, 8]


def test_stream_without_state_reports_repeated_samples():
    make = source_maker(lambda: PlainDataset(37), 8, StopCondition(12))
    first = train_steps(make, 2, 7)
    second = train_steps(make, 3, 100, after=7, state=first.state)
    (message,) = second.remarks
    assert message.startswith("train_dataset had no state_dict() or load_state_dict()")
    assert message.endswith("Epoch 1 starts over and repeats 16 samples.")
    assert [(step["step"], step["epoch"], step["batch_idx"]) for step in second.steps] == [
        (8, 1, 0), (9, 1, 1), (10, 1, 2), (11, 1, 3), (12, 1, 4),
    ]  # fmt: skip
    # At the end of an epoch, nothing is repeated.
    assert train_steps(make, 1, 1, after=5, state=train_steps(make, 2, 5).state).remarks == []


class UnstorableDataset(StatefulDataset):
    def state_dict(self):
        return {"at": self.at, "seen": {1, 2}}


def test_stream_positions_that_a_checkpoint_cannot_hold_are_refused():
    with pytest.raises(
        UserError, match=r"state_dict.. of train_dataset/.*/seen has type builtins.set, which"
    ):
        train_steps(source_maker(lambda: UnstorableDataset(37), 8, StopCondition(12)), 1, 7)
    make = source_maker(lambda: StatefulDataset(37), 8, StopCondition(12))
    of_older_version = {**train_steps(make, 1, 7).state, "marks": torch.zeros(9, dtype=torch.uint8)}
    with pytest.raises(UserError, match="in the format of an older hpctrain"):
        train_steps(make, 1, 100, after=7, state=of_older_version)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, pytest.param(3, marks=pytest.mark.extended)])
def test_workers_read_the_same_stream(num_workers):
    lengths = [9, 2, 0, 14, 5]
    uninterrupted = consumed_samples(
        [train_steps(source_maker(lambda: ShardedDataset(lengths), 4, StopCondition(None, 2)), 1, 10**6)]
    )
    make = source_maker(lambda: ShardedDataset(lengths), 4, StopCondition(None, 2), num_workers)
    assert consumed_samples(train_segments(make, [(4, 1)])) == uninterrupted


def test_workers_do_not_split_a_stream_that_splits_itself():
    make = source_maker(lambda: PlainDataset(20), 4, StopCondition(None, 1), num_workers=2)
    without_workers = source_maker(lambda: PlainDataset(20), 4, StopCondition(None, 1))
    assert consumed_samples([train_steps(make, 1, 100)]) == consumed_samples(
        [train_steps(without_workers, 1, 100)]
    )


@pytest.mark.parametrize(
    "dataset", [lambda: range(3), lambda: StatefulDataset(3), lambda: ShardedDataset([1, 0, 0, 2])]
)
def test_rank_without_samples_joins_every_collective(dataset):
    segment = train_steps(source_maker(dataset, 8, StopCondition(2)), 5, 10)
    assert len(segment.steps) == 2
    for step in segment.steps:
        assert sum(len(indices) for indices in step["indices"]) == 3
        assert all(len(batch) >= 1 for micro in step["micro"] for _, batch in micro)


def test_stream_without_samples_is_an_error():
    with pytest.raises(hpctrain.UserError, match="no samples in epoch 0"):
        train_steps(source_maker(lambda: ShardedDataset([0, 0]), 4, StopCondition(None, 2)), 2, 10)
