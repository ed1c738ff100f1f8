"""Time and memory until the first batch of an epoch is available: hpctrain's order and DistributedSampler.

    python benchmarks/data_order.py [--samples N] [--limit RATIO]

DistributedSampler first creates a list of all samples. Its time and memory are measured at several smaller
sizes and extrapolated linearly, which is favourable for DistributedSampler. Each measurement runs in a
separate process, alternately. Exits with 1 if a ratio exceeds the limit.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

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
    """Return seconds, and the growth of the process in bytes."""
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10**9)
    parser.add_argument("--limit", type=float, default=1 / 1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure_here(options.measure[0], int(options.measure[1]))
        return
    own: list[tuple[float, float]] = []
    other: dict[int, list[tuple[float, float]]] = {size: [] for size in FITS}
    for _ in range(options.rounds):
        own.append(measure("ours", options.samples))
        for size in FITS:
            other[size].append(measure("theirs", size))
    seconds, num_bytes = (min(values) for values in zip(*own, strict=True))
    their_seconds, their_bytes = (
        extended({size: min(value[i] for value in other[size]) for size in FITS}, options.samples)
        for i in (0, 1)
    )
    print(f"until the first {BATCH} of {options.samples:,} samples are available:")
    print(f"hpctrain             {seconds * 1000:12.2f} ms  {num_bytes / 1e6:12.2f} MB")
    print(f"DistributedSampler   {their_seconds * 1000:12.2f} ms  {their_bytes / 1e6:12.2f} MB  (extended)")
    ratios = seconds / their_seconds, num_bytes / their_bytes
    print(f"ratio                {ratios[0]:12.6f}     {ratios[1]:12.6f}     (limit {options.limit})")
    sys.exit(max(ratios) > options.limit)


def extended(measured: dict[int, float], size: int) -> float:
    """Extrapolate linearly from the smallest and the largest measurement to `size`."""
    low, high = min(measured), max(measured)
    slope = (measured[high] - measured[low]) / (high - low)
    return measured[high] + slope * (size - high)


if __name__ == "__main__":
    main()
