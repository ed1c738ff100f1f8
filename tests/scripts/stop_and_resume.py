"""Train on any number of ranks: `stop_and_resume.py OUT LAST_STEP [STOP_AT RANK]`, in float32, no dropout.

Optionally, one rank gets SIGTERM in a step, and all exit. Rank 0 writes its weights to OUT.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn
from torch.nn import functional as F

import hpctrain


class Net(hpctrain.Module):
    def __init__(self, stop_at: int, rank: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
        self.calls, self.stop_at, self.rank = 0, stop_at, rank

    def training_step(self, batch, batch_idx):
        self.calls += 1
        if self.calls == self.stop_at and int(os.environ.get("RANK", 0)) == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)


def dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(203, 16, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, last_step, *stop = sys.argv[1:]
    stop_at, rank = map(int, stop or ("0", "0"))
    trainer = hpctrain.Trainer(
        max_steps=int(last_step), global_batch_size=16, checkpoint_every=3, seed=1, record_samples=True
    )
    module = Net(stop_at, rank)
    try:
        trainer.fit(module, dataset())
    except SystemExit as leaving:
        print("stopped" if leaving.code == 75 else f"left with {leaving.code}")
    else:
        if trainer.is_main:
            torch.save(module.state_dict(), out)
