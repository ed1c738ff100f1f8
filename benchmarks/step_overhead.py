"""Time of a step in the Trainer, Lightning and Accelerate, relative to a hand-written loop.

    python benchmarks/step_overhead.py [--rounds N] [--steps N]

The work is identical and small, to make the overhead visible: three linear layers, batches of 32 from a
TensorDataset in memory, Adam. The hand-written loop uses DistributedSampler and DataLoader. `computation
only` consists of the forward and backward passes, the optimizer's step and its zero_grad on one existing
batch. All variants run alternately in the same processes. The time of a step is the median over all steps of
a round. Work done once for many steps is not included in this median, so the median over stretches of 32
steps is also shown. On two ranks, differences of a tenth are noise, because the ranks wait for each other.
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
from results import Results
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
    "computation only": bare,
    "hand-written loop": by_hand,
    "Trainer": in_hpctrain,
    "Trainer with a run folder": in_hpctrain_with_a_run_folder,
    "Accelerate": in_accelerate,
    "Lightning": in_lightning,
}


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def measure(rounds: int, steps: int) -> None:
    """Run a rank; rank 0 prints the median step of each round in µs, by variant, alone and over stretches."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if world_size() > 1:
        dist.init_process_group("gloo")
    dataset = data(NUM_SAMPLES)
    steps_us: dict[str, list[float]] = {name: [] for name in WAYS}
    stretches_us: dict[str, list[float]] = {name: [] for name in WAYS}
    out, quiet = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    for _ in range(rounds):
        for name, way in WAYS.items():
            clock = Clock()
            way(dataset, WARM_UP + steps, clock)
            steps_us[name].append(statistics.median(clock.steps()) * 1e6)
            stretches_us[name].append(statistics.median(clock.stretches()) * 1e6)
    sys.stdout.flush()
    os.dup2(out, 1)
    if rank() == 0:
        print(json.dumps({"": steps_us, ", 32 steps": stretches_us}), flush=True)


def on_ranks(count: int, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
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
    times: dict[str, dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=7)
    results.parser.add_argument("--steps", type=int, default=300)
    results.parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = results.parse()
    if options.steps <= STRETCH:
        results.parser.error(f"--steps is {options.steps}, but a stretch has {STRETCH}")
    if options.measure:
        measure(options.rounds, options.steps)
        return
    for count in (1, 2):
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        for kind, times in on_ranks(count, options.rounds, options.steps).items():
            baseline = times.pop("hand-written loop")
            for name, rounds in times.items():
                ratios = [own / other for own, other in zip(rounds, baseline, strict=True)]
                is_ours = name == "Trainer"
                limit = 1.0 if is_ours else None
                results.add(f"{name}, {ranks}{kind}", ratios, limit=limit, headline=is_ours and not kind)
            if count == 1:
                extra = [
                    own - bare for own, bare in zip(times["Trainer"], times["computation only"], strict=True)
                ]
                unit, limit = "µs more than the computation", None if kind else 30.0
                results.add(f"Trainer, {ranks}{kind}", extra, unit, limit=limit)
    results.finish()


if __name__ == "__main__":
    main()
