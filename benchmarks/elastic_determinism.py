"""Time of a training step of `examples/gpt.py` with elastic determinism, relative to plain `ddp`.

    python benchmarks/elastic_determinism.py [--rounds N] [--steps N]

Both variants use the same micro-batches of 16 samples: one or four grains per rank and step. They train in
turns of a few steps, in the same processes, so both see the same load of the machine. A round is one turn of
each, and its ratio is that of the median times of a step.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from results import Results

import hpctrain

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
#: Width, depth and bytes of context, by number of parameters.
SIZES = {"0.4 million parameters": (128, 2, 64), "5 million parameters": (256, 6, 64)}
GRAIN_SIZE, WARM_UP = 16, 4


def load_example():
    spec = importlib.util.spec_from_file_location("gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def time_of_step(gpt, text: bytes, size: str, steps: int, num_grains: int, *, elastic: bool) -> float:
    width, depth, context = SIZES[size]
    times: list[float] = []

    class Timed(gpt.GPT):
        def configure_optimizers(self):
            optimizer, schedule = super().configure_optimizers()
            optimizer.register_step_post_hook(lambda *_: times.append(time.perf_counter()))
            return optimizer, schedule

    world_size = dist.get_world_size() if dist.is_initialized() else 1
    options = {"elastic_determinism": True, "grain_size": GRAIN_SIZE} if elastic else {}
    trainer = hpctrain.Trainer(
        max_steps=steps + WARM_UP,
        global_batch_size=GRAIN_SIZE * num_grains * world_size,
        micro_batch_size=GRAIN_SIZE,
        checkpoint_every=None,
        strategy="ddp",
        seed=1,
        **options,
    )
    model = Timed(context, width, depth, 4, steps, 1e-3)
    trainer.fit(model, gpt.Windows(text, context))
    return statistics.median(after - before for before, after in itertools.pairwise(times[WARM_UP - 1 :]))


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the ratio in each round, by size and number of grains."""
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    gpt, results = load_example(), {}
    text = gpt.standard_library(1_000_000)
    for size, num_grains in zip((*SIZES, *SIZES)[:3], (1, 1, 4), strict=True):
        ratios = []
        for number in range(args.rounds):
            # The order alternates, so that neither variant always runs first.
            turns = (False, True) if number % 2 else (True, False)
            times = {
                elastic: time_of_step(gpt, text, size, args.steps, num_grains, elastic=elastic)
                for elastic in turns
            }
            ratios.append(times[True] / times[False])
        grains = "1 grain" if num_grains == 1 else f"{num_grains} grains"
        results[f"{size}, {grains} per step"] = ratios
    return results


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=21)
    results.parser.add_argument("--steps", type=int, default=10)
    results.parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = results.parse()
    if args.rank:
        measured = measure(args)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(measured))
        return
    for world_size in (1, 2):
        for name, ratios in run_ranks(world_size, args).items():
            ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
            results.add(f"{name}, {ranks}", ratios, limit=1.05, headline=True)
    results.finish()


def run_ranks(world_size: int, args: argparse.Namespace) -> dict[str, list[float]]:
    options = ["--rank", "--rounds", str(args.rounds), "--steps", str(args.steps)]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 10000)}
    ranks = []
    for rank in range(world_size):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        env = {**common, **address, **{name: str(value) for name, value in own.items()}}
        env = env if world_size > 1 else common
        command = [sys.executable, __file__, *options]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed")
    return json.loads(outputs[0].splitlines()[-1])


if __name__ == "__main__":
    main()
