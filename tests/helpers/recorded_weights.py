"""A training on equal ranks that records its weights after each step, and ends when told."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from helpers.training_runs import Run
from helpers.waiting import wait_for

#: Ranks with equal data, so the weights are those of a single process. Each step is recorded. Rank 1 may
#: use a profiler itself. A file ends the training.
TRAINING = """
import os, sys, time
import torch, torch.distributed as dist
from torch.profiler import profile
dist.init_process_group("gloo")
rank, run, step = os.environ["RANK"], os.environ["HPCTRAIN_RUN_DIR"], 0
torch.manual_seed(1)
layer = torch.nn.Linear(8, 8)
model = torch.nn.parallel.DistributedDataParallel(layer)
optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(2)
own = profile() if rank == "1" and "profile" in sys.argv else None
if own:
    own.start()
while not os.path.exists(f"{run}/last") or step < int(open(f"{run}/last").read()):
    time.sleep(0.02)
    model(torch.randn(4, 8, generator=generator)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    with open(f"{run}/weights-{rank}", "a") as file:
        print(layer.weight.sum().item().hex(), file=file)
if own:
    own.stop()
    print("own profile", len(own.events()) > 1000)
"""


#: No further environment variables.
EMPTY: Mapping[str, str] = {}


def weights(run: Run, rank: int) -> list[str]:
    return (run.path / f"weights-{rank}").read_text().split()


def reference_weights(num_steps: int) -> list[str]:
    """Return the sum of the weights after each step of an undisturbed training."""
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    layer = torch.nn.Linear(8, 8)
    torch.random.set_rng_state(state)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    generator, found = torch.Generator().manual_seed(2), []
    for _ in range(num_steps):
        layer(torch.randn(4, 8, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(layer.weight.sum().item().hex())
    return found


def submit(tmp_path: Path, *program: str, backend: str = "local", env: Mapping[str, str] = EMPTY) -> Run:
    """Submit the program on two ranks per node, and wait for its first steps."""
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "train.sh").write_text(f'#!/bin/sh\n{sys.executable} train.py "$@" || exit 1\n')
    (tmp_path / "train.sh").chmod(0o755)
    run = Run(tmp_path / "run", {"OMP_NUM_THREADS": "1", **env})
    options = [f"--backend={backend}", "--ntasks-per-node=2", "--run-dir=run", "--standby-workers=never"]
    run.hpctrain("submit", *options, *program, cwd=tmp_path)
    wait_for(lambda: run.status()["step"], 60, "the first step")
    return run


def end(run: Run) -> None:
    """End the training after a few steps."""
    temporary = run.path / "last.tmp"
    temporary.write_text(str(len(weights(run, 0)) + 50))
    temporary.rename(run.path / "last")
    assert run.wait() == 0
    assert run.events("failure") == []
