"""Time of a DDP step with different bucket sizes, relative to the fastest, on two ranks.

    python benchmarks/buckets.py [--rounds N] [--steps N]

The model has twelve linear layers of 4 MB each, and the ranks use gloo. All variants run alternately in the
same two processes. Only large differences are significant. hpctrain uses buckets of 25 MB, with the gradients
as views.
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
from results import Results
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
    """Run a rank; rank 0 prints the median time of a step in each round, in milliseconds, by variant."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.randn(BATCH, WIDTH)
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, words in WAYS.items():
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
            parallel = DistributedDataParallel(model, **{"gradient_as_bucket_view": True, **words})
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            times = []
            for step in range(steps + 3):  # DDP regroups after the first
                begun = time.perf_counter()
                parallel(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if step >= 3:
                    times.append(time.perf_counter() - begun)
            taken[name].append(statistics.median(times) * 1e3)
    if dist.get_rank() == 0:
        print(json.dumps(taken), flush=True)
    dist.destroy_process_group()


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=4)
    results.parser.add_argument("--steps", type=int, default=12)
    results.parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = results.parse()
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
    rounds: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    fastest = min(statistics.median(times) for times in rounds.values())
    for name, times in rounds.items():
        results.add(name, [time_ms / fastest for time_ms in times], limit=1.15 if name == OURS else None)
    results.finish()


if __name__ == "__main__":
    main()
