"""Speed of fetching in-memory training data, as a multiple of a DataLoader with per-sample access.

    python benchmarks/data_fetch.py [--batch N] [--limit RATIO]

Both produce shuffled batches of the same TensorDataset, alternately in this process. Exits with 1 if the
ratio of the fastest rounds is below the limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.loader_config import LoaderConfig
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
        dataset,
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=5.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset = TensorDataset(torch.randn(NUM_SAMPLES, WIDTH), torch.randint(0, 10, (NUM_SAMPLES,)))
    rounds = [
        tuple(microseconds(way(dataset, options.batch), options.batches) for way in (ours, theirs))
        for _ in range(options.rounds)
    ]
    own, other = (min(times) for times in zip(*rounds, strict=True))
    print(f"hpctrain                          {own:8.1f} µs a batch of {options.batch}")
    print(f"DataLoader, sample by sample      {other:8.1f} µs")
    print(f"ratio                             {other / own:8.1f}    (at least {options.limit})")
    sys.exit(other / own < options.limit)


if __name__ == "__main__":
    main()
