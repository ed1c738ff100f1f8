"""Time to fetch a batch from memory, compared with a DataLoader that fetches sample by sample.

    python benchmarks/data_fetch.py [--batch N] [--batches N] [--rounds N]

Both produce shuffled batches of 32 samples of the same TensorDataset, alternately in this process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from results import Results
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.loader_config import DataLoaderParts, LoaderConfig
from hpctrain.training.data.step_source import MapStepSource, StopCondition

NUM_SAMPLES, WIDTH = 60_000, 64


class PerSample(Dataset):
    """The tensors, for a loader that fetches samples one by one."""

    def __init__(self, tensors: TensorDataset) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> Any:
        return self._tensors[index]


def ours(dataset: TensorDataset, batch: int) -> Iterator[Any]:
    feed = MapStepSource(
        DataLoaderParts(dataset),
        LoaderConfig(seed=1, global_batch_size=batch),
        DataRank(0, 1),
        StopCondition(steps=10**9),
    )
    for step in feed.steps():
        for micro_batch in step.micro_batches:
            yield micro_batch.batch


def theirs(dataset: TensorDataset, batch: int) -> Iterator[Any]:
    while True:
        yield from DataLoader(PerSample(dataset), batch_size=batch, shuffle=True)


def microseconds(batches: Iterator[Any], count: int) -> float:
    next(batches)
    begun = time.perf_counter()
    for _ in islice(batches, count):
        pass
    return (time.perf_counter() - begun) / count * 1e6


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--batch", type=int, default=32)
    results.parser.add_argument("--batches", type=int, default=1500)
    results.parser.add_argument("--rounds", type=int, default=5)
    options = results.parse()
    torch.set_num_threads(1)
    dataset = TensorDataset(torch.randn(NUM_SAMPLES, WIDTH), torch.randint(0, 10, (NUM_SAMPLES,)))
    rounds = [
        [microseconds(way(dataset, options.batch), options.batches) for way in (ours, theirs)]
        for _ in range(options.rounds)
    ]
    results.add("hpctrain", [own for own, _ in rounds], "µs per batch")
    results.add("DataLoader, sample by sample", [other for _, other in rounds], "µs per batch")
    results.add("DataLoader ÷ hpctrain", [other / own for own, other in rounds], limit=5.0, at_least=True)
    results.finish()


if __name__ == "__main__":
    main()
