"""Fit a sine with Lightning: the script after it is ported."""

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpctrain


class Sine(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    x = torch.linspace(-3, 3, 1024).unsqueeze(1)
    data = TensorDataset(x, x.sin())
    trainer = hpctrain.Trainer(
        max_steps=320,
        global_batch_size=64,
        gradient_clip_val=1.0,
        seed=1,
    )
    trainer.fit(
        Sine(),
        DataLoader(data, batch_size=32, shuffle=True),
        DataLoader(data, batch_size=32),
        ckpt_path="last",
    )
