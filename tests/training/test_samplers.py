"""DataLoaders with any sampler: the same order on any number of ranks and through any stops."""

import random
import threading
from collections import Counter
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from helpers.ranks import run_on_ranks
from helpers.simulated_ranks import ALONE, TrainedSteps, train_steps
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import hpctrain
from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.dataset_adapters import make_step_source, make_validation_set
from hpctrain.training.data.loader_config import LoaderConfig
from hpctrain.training.data.sampler_plan import SamplerPlan
from hpctrain.training.data.step_source import StopCondition

SIZE, BATCH = 23, 5


class OwnSampler(Sampler[int]):
    """Draws from generators of its own, as many samples as `set_epoch` and chance determine."""

    def __init__(self) -> None:
        import numpy

        self.python, self.numpy = random.Random(1), numpy.random.default_rng(2)
        self.torch, self.epoch = torch.Generator(), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        yield from range(self.epoch + 1)
        for _ in range(self.python.randrange(3, 9)):
            yield int(self.numpy.integers(SIZE))
            yield int(torch.randint(SIZE, (), generator=self.torch))


class Buckets(Sampler[list[int]]):
    """Batches of varying sizes, and in varying number, over a sampler without a length."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        samples = list(self.sampler)
        while samples:
            size = random.randint(1, 6)
            yield samples[:size]
            del samples[:size]


def loader(**options: Any) -> DataLoader:
    return DataLoader(range(SIZE), **({"batch_size": BATCH} | options), collate_fn=list)


LOADERS = {
    "in order": lambda: loader(),
    "shuffled": lambda: loader(shuffle=True),
    "drop_last": lambda: loader(shuffle=True, drop_last=True),
    "list": lambda: loader(sampler=[3, 1, 4, 1, 5, 9, 2]),
    "weighted": lambda: loader(sampler=WeightedRandomSampler(range(1, SIZE + 1), 17)),
    "subset": lambda: loader(sampler=SubsetRandomSampler(range(3, 15))),
    "own generators": lambda: loader(sampler=OwnSampler()),
    "distributed": lambda: loader(sampler=DistributedSampler(range(SIZE), 2, 1)),
    "torchdata": lambda: StatefulDataLoader(
        range(SIZE), batch_size=BATCH, sampler=SubsetRandomSampler(range(3, 15)), collate_fn=list
    ),
    "batch sampler": lambda: DataLoader(
        range(SIZE), batch_sampler=BatchSampler(SubsetRandomSampler(range(12)), 5, False), collate_fn=list
    ),
    "buckets": lambda: DataLoader(
        range(SIZE), batch_sampler=Buckets(SubsetRandomSampler(range(20))), collate_fn=list
    ),
    "lengths": lambda: DataLoader(
        range(SIZE), batch_sampler=hpctrain.LengthGroupedBatchSampler(range(SIZE), 4), collate_fn=list
    ),
    "mixture": lambda: DataLoader(
        hpctrain.Mixture([range(15), range(15, SIZE)], lambda step: [step, 5]), BATCH, collate_fn=list
    ),
}
#: Loaders that use each of these samples once per epoch.
COMPLETE = {
    **dict.fromkeys(["in order", "shuffled", "distributed", "lengths"], range(SIZE)),
    "subset": range(3, 15), "batch sampler": range(12), "buckets": range(20),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_rank_draws_at_a_time(monkeypatch):
    """Ranks are threads here, with common random generators."""
    lock, draw = threading.Lock(), SamplerPlan._draw

    def locked(*arguments: Any) -> Any:
        with lock:
            return draw(*arguments)

    monkeypatch.setattr(SamplerPlan, "_draw", locked)


def source_maker(make_loader: Any, max_steps: int | None = None, **loading: Any) -> Any:
    until = StopCondition(max_steps, None if max_steps else 3)
    loader_config = LoaderConfig(5, seed_samples=False, **loading)

    def make(data_rank: DataRank, group: Any) -> Any:
        return make_step_source(make_loader(), loader_config, data_rank, group, until)

    return make


def orders(*segments: TrainedSteps) -> list[tuple[Any, ...]]:
    """Return number, epoch and samples of each step, in order."""
    return [
        (step["step"], step["epoch"], step["batch_idx"], step["ends_epoch"], [*chain(*step["indices"])])
        for segment in segments
        for step in segment.steps
    ]


@pytest.mark.parametrize("kind", LOADERS)
def test_order_does_not_depend_on_ranks_or_stops(kind):
    make = source_maker(LOADERS[kind])
    undisturbed = train_steps(make, 1, 10**6)
    expected = orders(undisturbed)
    assert undisturbed.finished
    last_of_epoch = next(step for step, _, _, ends_epoch, _ in expected if ends_epoch)
    for num_steps in (1, last_of_epoch, last_of_epoch + 1):
        before = train_steps(make, 3, num_steps)
        after = train_steps(make, 2, 10**6, after=num_steps, state=before.state, micro_batch_size=2)
        assert orders(before, after) == expected
        fetched = [[*chain(*(batch[:size] for size, batch in rank))] for rank in after.steps[0]["micro"]]
        assert fetched == after.steps[0]["indices"]
        assert after.finished


@pytest.mark.parametrize("kind", COMPLETE)
def test_each_sample_is_used_once_per_epoch(kind):
    steps = orders(train_steps(source_maker(LOADERS[kind]), 2, 10**6))
    epochs = [[*chain(*(s[-1] for s in steps if s[1] == epoch))] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(COMPLETE[kind])] * 3
    assert (epochs[0] != epochs[1]) == (kind != "in order")


def test_shuffled_loader_has_the_order_of_its_dataset():
    expected = train_steps(source_maker(lambda: range(SIZE), global_batch_size=BATCH, collate_fn=list), 2, 99)
    for kind in ("shuffled", "distributed"):
        assert orders(train_steps(source_maker(LOADERS[kind]), 2, 99)) == orders(expected)


def test_samplers_do_not_change_the_random_numbers_of_the_rank():
    before = torch.get_rng_state(), random.getstate()
    train_steps(source_maker(LOADERS["own generators"]), 1, 4)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


class Noise(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


def test_repeated_samples_have_new_random_numbers_in_each_step():
    def make() -> DataLoader:
        return DataLoader(Noise(), 1, sampler=[0, 1, 0, 1, 0], collate_fn=list)

    def fetched(rank: int, world_size: int) -> list[Any]:
        data_rank = DataRank(rank, world_size)
        source = make_step_source(make(), LoaderConfig(5), data_rank, ALONE, StopCondition(5))
        source.begin(0)
        return [micro.batch[0] for step in source.steps() for micro in step.micro_batches]

    values = fetched(0, 1)
    assert [index for index, _ in values] == [0, 1, 0, 1, 0]
    assert len({noise for _, noise in values}) == 5
    assert values == fetched(0, 2)


# Mixtures.


def mixed(weights: Any, sizes: tuple[int, ...], batch: int, num_steps: int) -> list[list[int]]:
    """Return the samples of each step."""
    make = source_maker(
        lambda: hpctrain.Mixture([range(size) for size in sizes], weights),
        num_steps,
        global_batch_size=batch,
    )
    return [step[-1] for step in orders(train_steps(make, 1, num_steps))]


def test_mixture_keeps_constant_proportions():
    steps = mixed([5, 3, 2], (1000, 500, 40), 16, 150)
    totals = Counter()
    for number, samples in enumerate(steps, 1):
        totals.update("abc"[(s >= 1000) + (s >= 1500)] for s in samples)
        assert [totals[each] for each in "abc"] == pytest.approx(
            [8 * number, 4.8 * number, 3.2 * number], abs=1
        )
        uses = Counter(s for samples in steps[:number] for s in samples if s >= 1500)
        assert max(uses.values()) - min(uses[s] for s in range(1500, 1540)) <= 1
    positions = [i for samples in steps for i, s in enumerate(samples) if s >= 1500]
    assert len({*positions}) == 16  # each rank receives a part


def test_proportions_of_a_mixture_follow_the_step():
    steps = mixed(lambda step: [1, 0] if step <= 10 else [0, 1] if step <= 20 else [1, 3], (50, 50), 3, 40)
    of_second = [sum(s >= 50 for s in samples) for samples in steps]
    assert of_second[:20] == [0] * 10 + [3] * 10
    assert sum(of_second[20:]) == pytest.approx(45, abs=1)


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], [1, float("nan")], lambda step: [step]])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(hpctrain.UserError, match=r"Mixture has 2 data sets, but its weights in step 1 are"):
        hpctrain.Mixture([range(SIZE), range(SIZE)], weights)


def test_mixture_in_another_data_set_is_refused():
    inner = hpctrain.Mixture([range(SIZE), range(SIZE)], [1, 3])
    for data in (Subset(inner, [1]), hpctrain.Mixture([range(SIZE), inner], [1, 1])):
        with pytest.raises(hpctrain.UserError, match="contains a Mixture, whose weights"):
            steps_of(data)


def test_length_groups_save_padding():
    lengths = torch.randint(1, 1000, (2000,), generator=torch.Generator().manual_seed(1))
    batches = [lengths[batch] for batch in hpctrain.LengthGroupedBatchSampler(lengths.tolist(), 16)]
    padded = sum(len(batch) * int(batch.max()) for batch in batches)
    assert padded < 1.1 * int(lengths.sum())
    means = torch.stack([batch.float().mean() for batch in batches])
    assert abs(means[: len(means) // 2].mean() - means[len(means) // 2 :].mean()) < 150  # in random order


# Trainings.


class Regression(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.layer(x) - y).square().mean()

    validation_step = training_step

    def predict_step(self, batch, batch_idx):
        return batch[0].flatten().tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def values(self) -> list[float]:
        return [self.layer.weight.item(), self.layer.bias.item()]


def samples() -> TensorDataset:
    x = torch.linspace(-1, 1, SIZE, dtype=torch.float64)[:, None]
    return TensorDataset(x, x.square() - x)


def test_gradient_is_the_mean_over_a_batch_of_any_size():
    module = Regression()
    batches = [[0], [1, 2, 3, 4, 5, 6, 7], [3, 9]]
    optimizer, (x, y) = module.configure_optimizers(), samples().tensors
    for batch in batches:
        optimizer.zero_grad()
        module.training_step((x[batch], y[batch]), 0).backward()
        optimizer.step()
    expected = module.values()
    trained = Regression()
    hpctrain.Trainer(max_steps=3, micro_batch_size=3).fit(
        trained, DataLoader(samples(), batch_sampler=batches)
    )
    assert trained.values() == pytest.approx(expected, rel=1e-12)


def add_one(batch: list[Any]) -> list[torch.Tensor]:
    x, y = torch.utils.data.default_collate(batch)
    return [x + 1, y]


class InWorker(Dataset):
    number = -1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.number


def number_worker(number: int) -> None:
    torch.utils.data.get_worker_info().dataset._fetcher._dataset.number = 40 + number


@pytest.mark.ranks
def test_settings_of_the_loader_are_used():
    data = DataLoader(InWorker(), 2, num_workers=2, worker_init_fn=number_worker, prefetch_factor=3)
    loading = LoaderConfig(timeout_s=7.0)
    source = make_step_source(data, loading, DataRank(0, 1), ALONE, StopCondition(2))
    assert (source.loading.num_workers, source.loading.prefetch_factor, source.loading.timeout_s) == (
        2,
        3,
        7.0,
    )
    source.begin(0)
    batches = [micro.batch.tolist() for step in source.steps() for micro in step.micro_batches]
    source.close()
    assert batches == [[40, 40], [41, 41]]


def test_collate_fn_and_batches_of_validation():
    trainer, module = hpctrain.Trainer(max_steps=1), Regression()
    x = samples().tensors[0].flatten()

    def predict(**options: Any) -> Any:
        return trainer.predict(module, DataLoader(samples(), **options))

    assert predict(batch_size=20, collate_fn=add_one) == [(x[:20] + 1).tolist(), (x[20:] + 1).tolist()]
    assert predict(batch_size=20, drop_last=True) == [x[:20].tolist()]
    assert predict(batch_size=2, sampler=[5, 3, 4]) == [x[[5, 3]].tolist(), x[[4]].tolist()]
    assert predict(batch_sampler=[[2], [4, 1, 0]]) == [x[[2]].tolist(), x[[4, 1, 0]].tolist()]


def test_validation_batches_of_a_batch_sampler_are_divided():
    data = DataLoader(range(SIZE), batch_sampler=[[1, 2, 3], [4], [5, 6, 7, 8], [0, 9]])
    ranks = [make_validation_set(data, LoaderConfig(), DataRank(rank, 3), ALONE) for rank in range(3)]
    assert [[(n, b.tolist()) for n, b in each.batches()] for each in ranks] == [
        [(1, [1]), (1, [2]), (1, [3]), (1, [4])],
        [(2, [5, 6]), (2, [7, 8])],
        [(1, [0]), (1, [9])],
    ]


# The batch size.


def steps_of(data: Any, world_size: int = 1, **options: Any) -> Any:
    trainer = hpctrain.Trainer(max_steps=2, **options)
    loading = LoaderConfig(
        global_batch_size=trainer.global_batch_size,
        global_batch_size_is_set="global_batch_size" in trainer.given,
    )
    made: list[Any] = []

    def make(data_rank: DataRank, group: Any) -> Any:
        made.append(make_step_source(data, loading, data_rank, group, StopCondition(2)))
        return made[-1]

    trained = train_steps(make, world_size, 2)
    return [sum(map(len, step["indices"])) for step in trained.steps], list(made[0].remarks)


def test_a_batch_of_the_loader_is_for_all_ranks():
    assert steps_of(loader()) == ([5, 5], [])
    sizes, (remark,) = steps_of(loader(), 2)
    assert sizes == [5, 5]
    assert "divided among all 2 ranks, so a step trains on 5 samples" in remark
    assert remark.endswith("set Trainer(global_batch_size=10).")
    sizes, remarks = steps_of(DataLoader(range(SIZE), batch_sampler=[[1, 2, 3]]), 2)
    assert (sizes, remarks) == ([3, 3], ["Each batch of the DataLoader is divided among all 2 ranks."])
    assert steps_of(loader(), 2, global_batch_size=10) == ([10, 10], [])
    assert steps_of(DataLoader(range(SIZE), batch_sampler=[[1, 2, 3]]), global_batch_size=3) == ([3, 3], [])
    assert steps_of(DataLoader(Stream(), 4)) == ([4, 4], [])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (loader(), "global_batch_size is 32, .* batch_size=5"),
        (
            DataLoader(range(SIZE), batch_sampler=[[1, 2], [3]]),
            "global_batch_size is 32, but the largest batch .* 2",
        ),
    ],
)
def test_another_batch_size_of_the_trainer_is_refused(data, message):
    with pytest.raises(hpctrain.UserError, match=message):
        hpctrain.Trainer(max_steps=1, global_batch_size=32).fit(Regression(), data)


# Refusals.


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(SIZE))


class OwnLoader(DataLoader):
    def __iter__(self) -> Any:
        return iter([])


class Counting(Sampler[int]):
    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Any:
        self.count += 1
        yield from [self.count, 0]


class Endless(Sampler[int]):
    def __iter__(self) -> Any:
        return repeat(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OwnLoader(range(SIZE)), "of type OwnLoader, which overrides __iter__"),
        (lambda: DataLoader(range(SIZE), batch_size=None), "batch_size=None"),
        (
            lambda: DataLoader(Stream(), 4, drop_last=True),
            "drop_last=True, which is not supported for an IterableDataset",
        ),
        (lambda: loader(num_workers=1, multiprocessing_context="fork"), "multiprocessing_context"),
        (
            lambda: DataLoader(
                range(SIZE),
                batch_sampler=hpctrain.StatefulBatchSampler(range(SIZE), 4, rank=0, num_replicas=1),
            ),
            "a StatefulBatchSampler",
        ),
        (lambda: loader(sampler=Counting()), "The Counting of train_dataset returned two different orders"),
        (lambda: loader(sampler=[1, SIZE]), f"indices from 1 to {SIZE}, but the data set has {SIZE} samples"),
        (lambda: loader(sampler=["a"]), "must return integers"),
        (lambda: loader(sampler=SubsetRandomSampler([])), "returned too few samples for a batch in epoch 0"),
        (
            lambda: loader(batch_size=50, drop_last=True),
            "23 samples, but the batch size is 50 and drop_last is True",
        ),
        (lambda: loader(sampler=Endless()), "returned more than 99 samples in an epoch"),
        (
            lambda: DataLoader(hpctrain.Mixture([range(SIZE)], [1]), sampler=[1, 2]),
            "is a Mixture, .* but its DataLoader has the sampler list",
        ),
    ],
)
def test_unsupported_loader_is_refused(monkeypatch, make, message):
    monkeypatch.setattr("hpctrain.training.data.sampler_plan._MAX_SAMPLES", 99)
    with pytest.raises(hpctrain.UserError, match=message):
        hpctrain.Trainer(max_steps=1).fit(Regression(), make())


class Changing(Sampler[int]):
    """Orders that change with what the training does, from the second epoch."""

    shift = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([(i + self.epoch * self.shift) % SIZE for i in range(SIZE)])


def test_order_that_changed_since_the_stop_is_refused():
    sampler = Changing()
    make = source_maker(lambda: loader(sampler=sampler))
    state = train_steps(make, 1, 7).state
    train_steps(make, 2, 1, after=7, state=state)
    sampler.shift = 1
    with pytest.raises(hpctrain.UserError, match="a different order for epoch 1 than before the stop"):
        train_steps(make, 2, 1, after=7, state=state)


def fit_own_part() -> str:
    rank = torch.distributed.get_rank()
    data = DataLoader(samples(), 4, sampler=SubsetRandomSampler(range(rank, SIZE, 2)))
    with pytest.raises(hpctrain.UserError) as error:
        hpctrain.Trainer(max_steps=1).fit(Regression(), data)
    return str(error.value)


@pytest.mark.ranks
def test_sampler_that_divides_the_samples_among_the_ranks_is_refused():
    assert all("on rank 0, but" in message for message in run_on_ranks(fit_own_part))


class Passes(hpctrain.Module):
    """Records the samples of each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.passes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.passes.append(len(batch))
        return (self.weight * batch.float()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train_passes(data: Any, **settings: Any) -> Passes:
    module = Passes()
    trainer = hpctrain.Trainer(max_epochs=1, on_bad_loss=None, **settings)
    trainer.fit(module, data)
    module.steps = trainer.step
    return module


class OwnBatches(BatchSampler):
    pass


def test_accumulated_batches_are_one_step() -> None:
    loader = DataLoader(range(SIZE), BATCH)
    accumulated = train_passes(loader, accumulate_grad_batches=2)
    assert accumulated.passes == [5, 5, 5, 5, 3]
    assert accumulated.steps == 3
    together = train_passes(DataLoader(range(SIZE), 2 * BATCH))
    assert torch.allclose(accumulated.weight, together.weight)
    assert train_passes(range(SIZE), global_batch_size=12, accumulate_grad_batches=3).passes[:3] == [4, 4, 4]
    for options, message in (
        ({"batch_size": BATCH, "drop_last": True}, "drop_last=True, so the batches of a step are unknown"),
        (
            {"batch_sampler": OwnBatches(OwnSampler(), BATCH, drop_last=False)},
            "with a batch_sampler, so the batches of a step are unknown",
        ),
    ):
        with pytest.raises(hpctrain.UserError, match=message):
            train_passes(DataLoader(range(SIZE), **options), accumulate_grad_batches=2)
