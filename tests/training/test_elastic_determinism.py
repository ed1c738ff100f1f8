"""Every bit of the result is the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_on_ranks
from torch import nn
from torch.utils.data import Dataset

import hpctrain
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

pytestmark = pytest.mark.ranks


class Noisy(Dataset):
    """Samples with augmentation."""

    def __len__(self):
        return 230

    def __getitem__(self, index):
        x = torch.full((6,), index / 100).sin() + 0.1 * torch.randn(6)
        return x, torch.tensor([index % 7]), x.sum()


class Net(hpctrain.Module):
    """Dropout, batch norm, an embedding, a scalar parameter, and one that only some steps use."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
        self.norm, self.dropout, self.head = nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.rare = nn.Parameter(torch.ones(5, 1))

    def forward(self, x, kind):
        x = self.blocks(x + self.embedding(kind.squeeze(1)))
        return self.head(self.dropout(self.norm(x))).squeeze(1) * self.gain

    def training_step(self, batch, batch_idx):
        x, kind, y = batch
        loss = nn.functional.mse_loss(self(x, kind), y)
        if batch_idx % 2:
            loss = loss + 0.01 * self.rare.square().sum()
        return {"loss": loss, "largest": y.max()}

    def validation_step(self, batch, batch_idx):
        x, kind, y = batch
        return {"val_loss": nn.functional.mse_loss(self(x, kind), y)}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def train(run_dir: str, max_steps: int, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train until `max_steps`, and return the complete state of the module."""
    settings = {"global_batch_size": 100, "gradient_clip_norm": 0.5, "strategy": "ddp", "seed": 3} | settings
    settings.setdefault("grain_size", 8)
    trainer = hpctrain.Trainer(
        max_steps=max_steps,
        run_dir=run_dir,
        elastic_determinism=True,
        validate_every=4,
        checkpoint_every=None,
        **settings,
    )
    module = Net()
    trainer.fit(module, Noisy(), Noisy())
    return {name: value.clone() for name, value in module.state_dict().items()}


def results(run_dir: Path, plan: list[tuple[int, int]], **settings: Any) -> tuple[Any, Any]:
    """Train on numbers of ranks until steps; return the state on rank 0, and the logged metrics."""
    state = None
    for world_size, step in plan:
        of_ranks = run_on_ranks(train, str(run_dir), step, settings, world_size=world_size)
        state = of_ranks[0]
        for other in of_ranks[1:]:
            assert all(torch.equal(other[name], state[name]) for name in state)
    records = read_json_lines(RunDir(run_dir).metrics)
    ignored = ("time", "attempt", "spent", "world_size", "samples_per_s")
    metrics = [{k: v for k, v in each.items() if k not in ignored} for each in records]
    return state, metrics


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return results(tmp_path_factory.mktemp("one") / "run", [(1, 12)])


def assert_same(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    for name in theirs[0]:
        assert torch.equal(ours[0][name], theirs[0][name]), name
    assert ours[1] == theirs[1]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_number_of_ranks_does_not_change_a_bit(undisturbed, tmp_path, world_size):
    assert_same(results(tmp_path / "run", [(world_size, 12)]), undisturbed)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_strategy_does_not_change_a_bit(undisturbed, tmp_path, strategy):
    assert_same(results(tmp_path / "run", [(3, 12)], strategy=strategy), undisturbed)
