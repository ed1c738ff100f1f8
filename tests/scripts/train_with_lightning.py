"""A Lightning script: dropout, validation, accumulated gradients, a schedule; the Trainer is hpctrain's.

Arguments after the path of the result are for Lightning's command line, with one of its own modules.
"""

import sys

import lightning
import torch
import torch.nn.functional as F
from disturbance import after_step
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpctrain.lightning import RunCheckpoint, Trainer

ACCUMULATE = 2


class Sine(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx % ACCUMULATE == ACCUMULATE - 1:
            after_step(self.global_step)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        # Validation draws random numbers, too.
        self.log("val_loss", F.mse_loss(self.net(x + torch.randn_like(x)), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def main(result: str) -> None:
    lightning.seed_everything(1)
    x = torch.linspace(-3, 3, 46).unsqueeze(1)
    data = TensorDataset(x, x.sin())
    module = Sine()
    trainer = Trainer(
        max_epochs=4,
        accelerator="cpu",
        accumulate_grad_batches=ACCUMULATE,
        callbacks=[RunCheckpoint(every_n_train_steps=2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
    trainer.fit(module, loader, DataLoader(data, batch_size=23))
    if trainer.is_global_zero:
        torch.save([*(p.detach() for p in module.parameters()), torch.tensor(trainer.global_step)], result)


def run_command_line(result: str) -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

    class Model(BoringModel):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            after_step(self.global_step)

    cli = LightningCLI(Model, BoringDataModule, trainer_class=Trainer)
    if cli.trainer.is_global_zero:
        torch.save(cli.trainer.global_step, result)


if __name__ == "__main__":
    result = sys.argv.pop(1)
    run_command_line(result) if sys.argv[1:] else main(result)
