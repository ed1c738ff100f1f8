"""Bit flips in the memory of a rank, in trainings with the Trainer."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from bit_flips import BitFlip
from helpers.ranks import run_on_ranks
from torch import nn

import hpctrain
from hpctrain.errors import BadLoss, SilentCorruption

STEPS, EVERY = 16, 4


class Net(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Linear(20, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        # Unlike the others, this one does not fail with a negative number of steps.
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def fit(run_dir: Path | None = None, strategy: str = "auto", **flip) -> dict[str, torch.Tensor]:
    """Train with a flip; return the final state."""
    module = Net()
    trainer = hpctrain.Trainer(
        max_steps=STEPS, global_batch_size=6, seed=3, replica_check_every=EVERY, checkpoint_every=6,
        run_dir=run_dir, strategy=strategy, callbacks=[BitFlip(**flip)] if flip else [],
    )  # fmt: skip
    trainer.fit(module, list(torch.randn(128, 3, generator=torch.Generator().manual_seed(5))))
    return module.state_dict()


def try_fit(run_dir: Path, **flip) -> tuple[dict[str, torch.Tensor], Exception | None]:
    """Train with a flip; return the final state, and the error that ended the training."""
    try:
        return fit(run_dir, **flip), None
    except (SilentCorruption, BadLoss) as error:
        return {}, error


def flips_are_found(folder: Path, seeds: range) -> int:
    """Flip bits of parameters and optimizer states; each run must then have the undisturbed result."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reference, found = fit(), 0
    for seed in seeds:
        chance = random.Random(seed)
        run_dir, odd, step = folder / str(seed), chance.randrange(world_size), chance.randrange(1, STEPS + 1)
        target = chance.choice(["parameter", "optimizer"])
        result, error = try_fit(run_dir, rank=odd, target=target, seed=seed, step=step)
        if isinstance(error, SilentCorruption):
            assert [each.rank for each in error.suspects] == [odd], error
            named = int(str(error).split()[2].rstrip(","))
            assert step <= named <= step + EVERY, (seed, step, error)
            result = fit(run_dir)
        elif error is not None:
            # A large value makes the loss of this rank infinite before the replicas are compared.
            assert f"on rank {odd}." in str(error), error
            result = reference
        found += error is not None
        assert all(torch.equal(result[name], value) for name, value in reference.items()), seed
        if rank == 0:
            shutil.rmtree(run_dir, ignore_errors=True)
    return found


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_with_a_flipped_bit_has_the_undisturbed_result_after_a_restart(tmp_path):
    seeds = range(12)
    found = run_on_ranks(flips_are_found, tmp_path, seeds, world_size=3, timeout=100.0)
    assert found[0] >= len(seeds) - 2
