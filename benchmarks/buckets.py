"""Time of a DDP step with different bucket sizes, with and without bucket views, on two ranks.

    python benchmarks/buckets.py [--rounds N] [--steps N] [--limit RATIO]

Twelve linear layers of 4 MB each, with gloo. All variants run alternately in the same two processes. The time
of a step is the median over all steps. Exits with 1 if hpctrain's setting (25 MB, gradients as views of the
buckets) is slower than `--limit` times the fastest variant.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, DEPTH, BATCH = 1024, 12, 32
OURS = "25 MB, views"
WAYS: dict[str, dict[str, Any]] = {
    "1 MB, views": {"bucket_cap_mb": 1},
    "5 MB, views": {"bucket_cap_mb": 5},
    OURS: {},
    "100 MB, views": {"bucket_cap_mb": 100},
    "25 MB, copies": {"gradient_as_bucket_view": False},
    "25 MB, views, static graph": {"static_graph": True},
}


def measure(rounds: int, steps: int) -> None:
    """Run a rank; rank 0 prints the median time of a step, in milliseconds, by variant."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.randn(BATCH, WIDTH)
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, words in WAYS.items():
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
            parallel = DistributedDataParallel(model, **{"gradient_as_bucket_view": True, **words})
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for step in range(steps + 3):  # DDP regroups after the first
                begun = time.perf_counter()
                parallel(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if step >= 3:
                    taken[name].append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        print(json.dumps({name: statistics.median(times) * 1e3 for name, times in taken.items()}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=float, default=1.15)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.rounds, options.steps)
        return
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    own = [str(Path(__file__)), "--measure", f"--rounds={options.rounds}", f"--steps={options.steps}"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        [sys.executable, *torchrun, *own],
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stderr)
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    fastest = min(times.values())
    for name, time_ms in times.items():
        print(f"{name:28} {time_ms:7.1f} ms  {time_ms / fastest:5.2f} × the fastest")
    sys.exit(times[OURS] / fastest > options.limit)


if __name__ == "__main__":
    main()
