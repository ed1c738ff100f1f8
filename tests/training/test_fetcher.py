"""Fetching of batches: equal to those of torch's DataLoader, in the fastest way for each dataset."""

import re

import numpy as np
import pytest
import torch
from helpers.iterable_datasets import ShardedDataset
from helpers.simulated_ranks import ALONE
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

import hpctrain
from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.dataset_adapters import make_validation_set
from hpctrain.training.data.fetcher import ColumnFetcher, SampleFetcher, make_fetcher
from hpctrain.training.data.loader_config import LoaderConfig
from hpctrain.training.data.sample_seeds import SampleSeeds

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10)


class PerSample(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return X[index], int(Y[index])


class Items(PerSample):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


def fetcher(dataset, collate_fn=None):
    return make_fetcher(dataset, collate_fn, SampleSeeds(0, "training"), "train_dataset")


@pytest.mark.parametrize(
    "dataset", [(X, Y.numpy()), {"x": X, "y": Y}, X, Subset(TensorDataset(X, Y), range(5, 10))]
)
def test_prefetched_small_batches_equal_single_fetches(dataset):
    fetcher_ = fetcher(dataset)
    orders = [(0, torch.randint(0, fetcher_.num_samples, (size,))) for size in [3, 1, 5, 3] * 20]
    batches = list(fetcher_.batches(iter(orders)))
    assert len(batches) == len(orders)
    for (epoch, indices), batch in zip(orders, batches, strict=True):
        torch.testing.assert_close(batch, fetcher_.fetch(epoch, indices), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        (TensorDataset(X, Y), ColumnFetcher),
        (Subset(TensorDataset(X, Y), range(10)), ColumnFetcher),
        (X, ColumnFetcher),
        (PerSample(), SampleFetcher),
        (Subset(PerSample(), range(10)), SampleFetcher),
        (Items(), SampleFetcher),
        ([(x, int(y)) for x, y in zip(X, Y, strict=True)], SampleFetcher),
    ],
)
def test_batches_equal_those_of_a_data_loader(dataset, kind):
    fetcher_ = fetcher(dataset)
    assert type(fetcher_) is kind
    assert fetcher_.num_samples == 10
    (expected,) = DataLoader(dataset, batch_sampler=[[3, 1, 9]])
    batch = fetcher_.fetch(0, torch.tensor([3, 1, 9]))
    assert type(batch) is type(expected)
    for actual, other in zip(batch, expected, strict=True):
        assert torch.equal(actual, other)
        assert actual.dtype == other.dtype


def test_arrays_tuples_and_dicts_are_indexed_per_batch(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    indices = torch.tensor([5, 0])
    assert torch.equal(fetcher(mapped).fetch(0, indices), X[indices])
    x, y = fetcher((mapped, Y)).fetch(0, indices)
    assert torch.equal(x, X[indices])
    assert torch.equal(y, Y[indices])
    assert fetcher({"x": X, "y": Y.numpy()}).fetch(0, indices)["y"].tolist() == [5, 0]
    first, second = random_split(TensorDataset(X, Y), [7, 3])
    subset_of_second = Subset(second, [2, 0])
    assert type(fetcher(first)) is ColumnFetcher
    assert fetcher(subset_of_second).fetch(0, torch.tensor([0, 1]))[1].tolist() == [
        second.indices[2],
        second.indices[0],
    ]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "train_dataset is empty"),
        (torch.empty(0, 3), "train_dataset is empty"),
        (Subset(PerSample(), []), "train_dataset is empty"),
        ((X, Y[:4]), "train_dataset have different lengths: [10, 4]"),
        ({"x": X, "name": "x"}, "is a dict, so each of its values must be a tensor"),
        (7, "train_dataset is of type int, which has no length"),
    ],
)
def test_invalid_dataset_is_refused(dataset, message):
    with pytest.raises(hpctrain.UserError, match=re.escape(message)):
        fetcher(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [torch.arange(11), ShardedDataset([4, 0, 7]), ShardedDataset([11])])
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_validation_sees_every_sample_once_on_any_ranks(dataset, num_workers):
    for world_size in (1, 3, 5):
        seen = []
        for rank in range(world_size):
            data = make_validation_set(
                dataset,
                LoaderConfig(seed=1, global_batch_size=4, num_workers=num_workers),
                DataRank(rank, world_size),
                ALONE,
            )
            for num_samples, batch in data.batches():
                assert len(batch) == num_samples <= 4
                seen += map(str, batch.tolist())
        assert len(seen) == len(set(seen)) == 11


@pytest.mark.parametrize(
    "dataset", [(X, Y.numpy()), {"x": X, "y": Y}, TensorDataset(X, Y), Subset((X, Y), range(10))]
)
def test_collate_function_gets_rows_of_columns(dataset):
    def collate(samples):
        rows = [sample.values() if isinstance(sample, dict) else sample for sample in samples]
        return [
            torch.stack([torch.as_tensor(value) for value in column]) for column in zip(*rows, strict=True)
        ]

    rows = fetcher(dataset, collate)
    assert rows.num_samples == 10
    torch.testing.assert_close(rows.fetch(0, torch.tensor([3, 1])), [X[[3, 1]], Y[[3, 1]]])


class Filtered(PerSample):
    """Returns None for one sample, as data sets do for a broken file."""

    def __getitem__(self, index):
        return None if index == 4 else X[index]


class Mean(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def without_none(samples):
    return torch.stack([sample for sample in samples if sample is not None])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_removed_samples_are_refused_if_batches_are_divided(num_workers):
    def fit(val_dataset=None, **options):
        trainer = hpctrain.Trainer(
            max_steps=2, global_batch_size=5, collate_fn=without_none, num_workers=num_workers, **options
        )
        trainer.fit(Mean(), Filtered(), val_dataset)

    fit()
    for call in (lambda: fit(micro_batch_size=2), lambda: fit(Filtered(), validate_every=2)):
        with pytest.raises(hpctrain.UserError, match=r"returned None for samples \[4\]"):
            call()
