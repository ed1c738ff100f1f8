"""Lightning's command line with hpctrain's Trainer; the first argument is the path of the result."""

from __future__ import annotations

import sys

import torch
from disturbance import after_step
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from hpctrain.lightning import Trainer


class Model(BoringModel):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        after_step(self.global_step)


if __name__ == "__main__":
    result = sys.argv.pop(1)
    cli = LightningCLI(Model, BoringDataModule, trainer_class=Trainer)
    if cli.trainer.is_global_zero:
        torch.save(cli.trainer.global_step, result)
