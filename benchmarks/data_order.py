"""Time and memory to compute the first batch of 10⁹ samples, relative to DistributedSampler.

    python benchmarks/data_order.py [--samples N] [--rounds N]

DistributedSampler first creates a list of all samples. Its time and memory are measured at several smaller
sizes and extrapolated linearly, which favors DistributedSampler. Both are measured alternately, each time in
a separate process. The figures are those of the best round.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from results import Results

FITS = (1_000_000, 2_000_000, 4_000_000)
BATCH = 256


def ours(num_samples: int) -> None:
    from hpctrain.training.data.sample_order import SampleOrder

    SampleOrder(num_samples, seed=1).indices(1, 0, BATCH).tolist()


def theirs(num_samples: int) -> None:
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(range(num_samples), num_replicas=8, rank=3, seed=1)
    sampler.set_epoch(1)
    samples = iter(sampler)
    [next(samples) for _ in range(BATCH)]


def measure(which: str, num_samples: int) -> tuple[float, float]:
    """Return the seconds, and the growth of the process's memory in bytes."""
    command = [sys.executable, __file__, "--measure", which, str(num_samples)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    seconds, num_bytes = json.loads(done.stdout)
    return seconds, num_bytes


def measure_here(which: str, num_samples: int) -> None:
    actions: dict[str, Callable[[int], None]] = {"ours": ours, "theirs": theirs}
    actions[which](10_000)  # excludes modules loaded on first use
    before, begun = peak_bytes(), time.perf_counter()
    actions[which](num_samples)
    seconds = time.perf_counter() - begun
    print(json.dumps([seconds, max(peak_bytes() - before, 4096)]))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--samples", type=int, default=10**9)
    results.parser.add_argument("--rounds", type=int, default=3)
    results.parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = results.parse()
    if options.measure:
        measure_here(options.measure[0], int(options.measure[1]))
        return
    own: list[tuple[float, float]] = []
    other: dict[int, list[tuple[float, float]]] = {size: [] for size in FITS}
    for _ in range(options.rounds):
        own.append(measure("ours", options.samples))
        for size in FITS:
            other[size].append(measure("theirs", size))
    for i, (name, unit, factor) in enumerate((("time", "ms", 1e3), ("memory", "MB", 1e-6))):
        ours_best = min(value[i] for value in own)
        theirs_best = extended(
            {size: min(value[i] for value in other[size]) for size in FITS}, options.samples
        )
        results.add(f"{name} of hpctrain", ours_best * factor, unit)
        results.add(f"{name} of DistributedSampler, extrapolated", theirs_best * factor, unit)
        results.add(f"ratio of {name}", ours_best / theirs_best, limit=0.001)
    results.finish()


def extended(measured: dict[int, float], size: int) -> float:
    """Extrapolate linearly from the smallest and the largest measurement to `size`."""
    low, high = min(measured), max(measured)
    slope = (measured[high] - measured[low]) / (high - low)
    return measured[high] + slope * (size - high)


if __name__ == "__main__":
    main()
