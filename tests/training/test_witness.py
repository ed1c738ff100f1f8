"""Gradients that two ranks compute: a device that computes wrong ones is named before they are applied."""

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bit_flips import BitFlip
from helpers.ranks import run_on_ranks
from torch import nn

import hpctrain
from hpctrain.errors import SilentCorruption

pytestmark = pytest.mark.ranks

STEPS, GRAIN_SIZE = 8, 2


class Net(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        layers = nn.Linear(3, 8), nn.Dropout(0.1), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.net = nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        return {"loss": self.net(batch).pow(2).mean(), "num_tokens": torch.tensor(len(batch))}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(
    flip: dict[str, Any] | None = None, run_dir: Path | None = None, **settings: Any
) -> list[torch.Tensor]:
    """Train with one grain per rank; return the final state."""
    settings = {
        "witness_every": 1,
        "max_steps": STEPS,
        "checkpoint_every": None,
        "strategy": "ddp",
        "seed": 3,
        "callbacks": [BitFlip(**flip)] if flip else [],
    } | settings
    settings.setdefault("global_batch_size", GRAIN_SIZE * int(os.environ["WORLD_SIZE"]))
    trainer = hpctrain.Trainer(elastic_determinism=True, grain_size=GRAIN_SIZE, run_dir=run_dir, **settings)
    module = Net()
    trainer.fit(module, list(torch.randn(128, 3, generator=torch.Generator().manual_seed(5))))
    return list(module.state_dict().values())


def flips_are_found(folder: Path, seeds: range) -> int:
    """Flip bits of gradients and activations; each run must then have the undisturbed result."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reference, found = fit(), 0
    for seed in seeds:
        chance, run_dir = random.Random(seed), folder / str(seed)
        odd, step = chance.randrange(world_size), chance.randrange(1, STEPS + 1)
        target = chance.choice(["gradient", "activation"])
        flip = {"rank": odd, "target": target, "seed": seed, "step": step}
        error = None
        try:
            result = fit(flip, run_dir, checkpoint_every=3)
        except SilentCorruption as caught:
            error = caught
            assert [each.rank for each in error.suspects] == [odd], error
            assert str(error).startswith(f"In step {step}, ")
            assert error.verified_step < step
            result = fit(None, run_dir)
        found += error is not None
        assert all(torch.equal(*pair) for pair in zip(result, reference, strict=True)), (seed, flip)
        if rank == 0:
            shutil.rmtree(run_dir, ignore_errors=True)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seeds",
    [
        range(8),
        *(pytest.param(range(n, n + 100), marks=pytest.mark.long) for n in range(1000, 2000, 100)),
    ],
)
def test_wrong_gradient_is_found_before_it_is_applied(tmp_path, seeds):
    found = run_on_ranks(flips_are_found, tmp_path, seeds, world_size=3, timeout=500.0)
    # The others change no gradient.
    assert found[0] >= len(seeds) / 2


def fit_on_uneven_nodes() -> list[torch.Tensor]:
    """Train on three nodes with two, two and one ranks."""
    rank = int(os.environ["RANK"])
    node = {"LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 1 if rank == 4 else 2, "GROUP_RANK": rank // 2}
    os.environ |= {name: str(value) for name, value in node.items()} | {"GROUP_WORLD_SIZE": "3"}
    return fit()


def test_nodes_may_have_different_numbers_of_ranks():
    run_on_ranks(fit_on_uneven_nodes, world_size=5)


def find_suspects(settings: dict[str, Any], *flips: dict[str, Any]) -> tuple[list[int], int, str]:
    try:
        fit(flips[0], **settings)
    except SilentCorruption as error:
        return [each.rank for each in error.suspects], error.verified_step, str(error)
    return [], -1, ""


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_persistent_fault_is_found_at_the_next_comparison(strategy):
    settings = {"witness_every": 4, "strategy": strategy}
    flip = {"rank": 1, "target": "activation", "seed": 5, "step": 2, "persistent": True}
    of_ranks = run_on_ranks(find_suspects, settings, flip, world_size=3)
    assert {tuple(suspects) for suspects, _, _ in of_ranks} == {(1,)}
    assert of_ranks[0][2].startswith("In step 4, ")
    assert of_ranks[0][1] == 0


def test_wrong_parameter_is_found_before_its_gradient_is_applied():
    flip = {"rank": 1, "target": "parameter", "seed": 5, "step": 3}
    suspects, _, text = run_on_ranks(find_suspects, {"replica_check_every": None}, flip, world_size=3)[0]
    assert suspects == [1], text
    assert re.match("In step [34], ", text), text


def train_without_flips(num_steps: int, seed: int) -> None:
    fit(max_steps=num_steps, seed=seed, log_every=1000)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_steps", "seed"),
    [(300, 3), *(pytest.param(10_000, seed, marks=pytest.mark.long) for seed in range(10))],
)
def test_no_false_alarm(num_steps, seed):
    run_on_ranks(train_without_flips, num_steps, seed, timeout=500.0)


def compare_with_uneven_grains() -> bool:
    """Ranks with several grains, and a rank without a grain in a short batch."""
    whole = fit(global_batch_size=8, max_steps=20)
    alone = fit(global_batch_size=8, max_steps=20, witness_every=None)
    return all(torch.equal(*pair) for pair in zip(whole, alone, strict=True))


@pytest.mark.parametrize("world_size", [3, pytest.param(5, marks=pytest.mark.long)])
def test_witness_does_not_change_the_result(world_size):
    assert all(run_on_ranks(compare_with_uneven_grains, world_size=world_size))
