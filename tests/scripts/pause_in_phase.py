"""A short training that pauses in one phase of its first attempt and reports this by a file."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import hpctrain
from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir

NUM_EPOCHS, NUM_SAMPLES, GLOBAL_BATCH_SIZE = 2, 48, 8


def pause(phase: str, seconds: float = 2.0) -> None:
    """In the chosen phase, create a file and sleep."""
    mark = Path(sys.argv[2], f"{phase}-{os.environ['RANK']}")
    if phase == sys.argv[1] and os.environ["HPCTRAIN_ATTEMPT"] == "0" and not mark.exists():
        mark.touch()
        time.sleep(seconds)


class Small(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            pause("step", 0.2)
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        pause("validation")
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


commit = CheckpointDir.commit


def commit_slowly(self, *args, **kwargs):
    """Pause, like a slow disk."""
    pause("save")
    return commit(self, *args, **kwargs)


if __name__ == "__main__":
    CheckpointDir.commit = commit_slowly
    pause("start")
    data = torch.utils.data.TensorDataset(
        torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    )
    trainer = hpctrain.Trainer(
        max_epochs=NUM_EPOCHS,
        global_batch_size=GLOBAL_BATCH_SIZE,
        record_samples=True,
        seed=1,
        checkpoint_every=4,
        checkpoint_async=False,
        validate_every=5,
    )
    trainer.fit(Small(), data, data)
