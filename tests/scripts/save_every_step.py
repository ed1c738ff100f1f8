"""Train `save_every_step.py LAST_STEP` steps, with a save after each."""

from __future__ import annotations

import os
import sys

import torch

import hpctrain


class Small(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    data = list(torch.randn(64, 8, generator=torch.Generator().manual_seed(3)))
    settings = {"global_batch_size": 4, "checkpoint_every": 1, "seed": 1}
    tier = os.environ.get("LOCAL_CHECKPOINTS")
    hpctrain.Trainer(max_steps=int(sys.argv[1]), local_checkpoints=tier, **settings).fit(Small(), data)
