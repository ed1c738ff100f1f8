"""Cost of a step in the Trainer, a hand-written loop, Lightning and Accelerate, on one and two ranks.

    python benchmarks/step_overhead.py [--rounds N] [--steps N] [--limit RATIO] [--limit-us MICROSECONDS]

The work is identical and small, to make the overhead visible: three linear layers, batches of 32 from a
TensorDataset in memory, Adam. All variants run alternately in the same processes. The time of a step is the
median over all steps, which is least affected by other load. Work done once for many steps is not included in
this median, so the median over stretches of 32 steps is also shown. `bare` consists of the forward and
backward passes, the optimizer's step and its zero_grad on one existing batch. Exits with 1 if the Trainer is
slower than `--limit` times the hand-written loop, by either median, or if its median step exceeds `bare` by
more than `--limit-us`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_SAMPLES, BATCH, WIDTH, CLASSES = 60_000, 32, 64, 10
#: Number of warm-up steps at the beginning of a round.
WARM_UP = 20
#: Number of steps in a stretch.
STRETCH = 32


class Clock:
    """Records the start time of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def tick(self) -> None:
        self.times.append(time.perf_counter())

    def steps(self) -> list[float]:
        counted = self.times[WARM_UP:]
        return [after - before for before, after in itertools.pairwise(counted)]

    def stretches(self) -> list[float]:
        """Return the time of a step, averaged over stretches."""
        steps = self.steps()
        return [
            statistics.fmean(steps[begin : begin + STRETCH])
            for begin in range(0, len(steps) - STRETCH + 1, STRETCH)
        ]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )


def data(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(num_samples, WIDTH), torch.randint(0, CLASSES, (num_samples,)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def bare(dataset: TensorDataset, steps: int, clock: Clock) -> None:
    model = network()
    optimizer = adam(model)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True) if world_size() > 1 else model
    x, y = dataset[:BATCH]
    for _ in range(steps):
        clock.tick()
        loss = F.cross_entropy(parallel(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def by_hand(dataset: TensorDataset, steps: int, clock: Clock) -> None:
    """Training loop as in PyTorch's tutorials."""
    model = network()
    optimizer = adam(model)
    parallel = DistributedDataParallel(model) if world_size() > 1 else model
    sampler = DistributedSampler(dataset, num_replicas=world_size(), rank=rank(), shuffle=True)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    done = epoch = 0
    while done < steps:
        sampler.set_epoch(epoch)
        for x, y in loader:
            clock.tick()
            optimizer.zero_grad()
            loss = F.cross_entropy(parallel(x), y)
            loss.backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
        epoch += 1


def in_hpctrain(dataset: TensorDataset, steps: int, clock: Clock, run_dir: str | None = None) -> None:
    import hpctrain

    class Model(hpctrain.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch, _batch_idx):
            clock.tick()
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return adam(self)

    trainer = hpctrain.Trainer(
        max_steps=steps, global_batch_size=BATCH * world_size(), checkpoint_every=None, run_dir=run_dir
    )
    trainer.fit(Model(), dataset)


def in_hpctrain_with_a_run_folder(dataset: TensorDataset, steps: int, clock: Clock) -> None:
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        if world_size() > 1:
            dist.broadcast_object_list(folders, src=0)
        in_hpctrain(dataset, steps, clock, run_dir=folders[0])


def in_accelerate(dataset: TensorDataset, steps: int, clock: Clock) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, adam(model), loader)
    done = 0
    while done < steps:
        for x, y in loader:
            clock.tick()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            done += 1
            if done == steps:
                break


def in_lightning(dataset: TensorDataset, steps: int, clock: Clock) -> None:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch, _batch_idx):
            clock.tick()
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return adam(self)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy="ddp" if world_size() > 1 else "auto",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(dataset, batch_size=BATCH, shuffle=True))


WAYS: dict[str, Callable[[TensorDataset, int, Clock], None]] = {
    "bare": bare,
    "hand-written": by_hand,
    "hpctrain": in_hpctrain,
    "hpctrain, with a run folder": in_hpctrain_with_a_run_folder,
    "Accelerate": in_accelerate,
    "Lightning": in_lightning,
}


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def measure(rounds: int, steps: int) -> None:
    """Run a rank; rank 0 prints the median step and the median over stretches, in µs, by variant."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if world_size() > 1:
        dist.init_process_group("gloo")
    dataset = data(NUM_SAMPLES)
    steps_s: dict[str, list[float]] = {name: [] for name in WAYS}
    stretches_s: dict[str, list[float]] = {name: [] for name in WAYS}
    out, quiet = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    for _ in range(rounds):
        for name, way in WAYS.items():
            clock = Clock()
            way(dataset, WARM_UP + steps, clock)
            steps_s[name] += clock.steps()
            stretches_s[name] += clock.stretches()
    sys.stdout.flush()
    os.dup2(out, 1)
    if rank() == 0:
        medians = {
            name: [statistics.median(each[name]) * 1e6 for each in (steps_s, stretches_s)] for name in WAYS
        }
        print(json.dumps(medians), flush=True)


def on_ranks(count: int, rounds: int, steps: int) -> dict[str, list[float]]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    own = [str(Path(__file__)), "--measure", "--rounds", str(rounds), "--steps", str(steps)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        [sys.executable, *(torchrun if count > 1 else []), *own],
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"on {count} ranks:\n{done.stderr}")
    times: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--limit", type=float, default=1.0)
    parser.add_argument("--limit-us", type=float, default=30.0)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= STRETCH:
        parser.error(f"--steps is {options.steps}, but a stretch has {STRETCH}")
    if options.measure:
        measure(options.rounds, options.steps)
        return
    too_slow = False
    for count in (1, 2):
        times = on_ranks(count, options.rounds, options.steps)
        print(f"{count} rank{'s' if count > 1 else ''}")
        print(f"  {'':28} {'a step':^39}{f'in stretches of {STRETCH}':^39}")
        for name, of_name in times.items():
            columns = [
                f"{us:8.1f} µs {us / by_hand:5.2f} × by hand {us - bare:+8.1f} µs"
                for us, by_hand, bare in zip(of_name, times["hand-written"], times["bare"], strict=True)
            ]
            print(f"  {name:28} {'  '.join(columns)}")
        ratios = [own / other for own, other in zip(times["hpctrain"], times["hand-written"], strict=True)]
        too_slow |= max(ratios) > options.limit
        too_slow |= times["hpctrain"][0] - times["bare"][0] > options.limit_us
    print(f"limits: {options.limit} × by hand, {options.limit_us} µs over the bare step")
    sys.exit(too_slow)


if __name__ == "__main__":
    main()
