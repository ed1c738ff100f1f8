"""A trial of a sweep: a small regression with dropout, whose loss falls faster with a higher rate."""

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpctrain


class Regression(hpctrain.Module):
    def __init__(self, lr: float, step_s: float) -> None:
        super().__init__()
        self.lr, self.step_s = lr, step_s
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        time.sleep(self.step_s)
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"val_loss": nn.functional.mse_loss(self.net(x), y)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.lr, args.seed) == (0.03, 3):
        raise ValueError(f"lr {args.lr} is too high for seed {args.seed}")
    is_slow = os.environ.get("HPCTRAIN_ATTEMPT", "0") == "0"
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = hpctrain.Trainer(
        max_steps=args.steps,
        global_batch_size=16,
        seed=args.seed,
        validate_every=5,
        checkpoint_every=10,
        hparams={"lr": args.lr},
    )
    trainer.fit(Regression(args.lr, args.step_s if is_slow else 0.0), data, data)
