"""Submitted runs whose number of ranks changes have the bits of a run on one rank."""

from __future__ import annotations

import pytest
from helpers.training_runs import Run
from helpers.waiting import wait_for

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import sys
import time

import torch
from torch.utils.data import TensorDataset

import hpctrain


class Net(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )

    def training_step(self, batch, batch_idx):
        time.sleep(float(sys.argv[1]))
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


trainer = hpctrain.Trainer(
    max_steps=30, global_batch_size=20, elastic_determinism=True, grain_size=4, seed=1, gradient_clip_norm=1.0
)
torch.manual_seed(2)
x = torch.randn(100, 4)
trainer.fit(Net(), TensorDataset(x, x.sum(1, keepdim=True)))
"""


def submit(folder, num_ranks: int, backend: str, env: dict[str, str], seconds: float) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    run = Run(folder / "run", {"OMP_NUM_THREADS": "1", **env})
    ranks = ["--nodes", "1", "--ntasks-per-node", str(num_ranks)]
    options = ["--backend", backend, *ranks, "--run-dir", str(run.path), str(folder / "train.py")]
    run.hpctrain("submit", *options, str(seconds))
    return run


def resized(folder, backend: str, env: dict[str, str]) -> Run:
    """Train on three ranks, kill a rank, cancel, and resume on two ranks."""
    run = submit(folder, 3, backend, env, 0.1)
    run.wait_for_step(5)
    run.kill_rank(1)
    wait_for(lambda: run.events("failure"), 60, "the failure")
    run.wait_for_step(12)
    run.hpctrain("cancel", str(run.path))
    run.wait()
    run.hpctrain("resume", str(run.path), "--ntasks-per-node", "2")
    assert run.wait() == 0, run.describe()
    sizes = {event["world_size"] for event in run.events("started")}
    assert sizes == {3, 2}
    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = submit(tmp_path_factory.mktemp("alone"), 1, "local", {}, 0.0)
    assert run.wait() == 0
    return run.losses()


@pytest.mark.long
@pytest.mark.ranks
def test_killed_and_resized_run_has_the_losses_of_one_rank(tmp_path, alone):
    assert resized(tmp_path / "local", "local", {}).losses() == alone


@pytest.mark.long
def test_killed_and_resized_run_on_slurm_has_the_losses_of_one_rank(slurm, tmp_path, alone):
    assert resized(tmp_path / "slurm", "slurm", slurm.env).losses() == alone
