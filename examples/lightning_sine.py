"""A Lightning script that does not use hpctrain. It saves checkpoints in the folder given as an option.

python examples/lightning_sine.py
srun --nodes=2 --ntasks-per-node=1 hpctrain exec -- python examples/lightning_sine.py --num-nodes 2
hpctrain submit --nodes 2 --ntasks-per-node 1 --follow examples/lightning_sine.py --num-nodes 2
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Sine(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    # hpctrain sets the run folder; without hpctrain, files are in the current folder.
    folder = os.path.join(os.environ.get("HPCTRAIN_RUN_DIR", "."), "checkpoints")
    parser = argparse.ArgumentParser(description="Fit a sine with Lightning.")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="ranks per node")
    parser.add_argument("--max-steps", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--checkpoints", default=folder)
    args = parser.parse_args()

    lightning.seed_everything(1)
    x = torch.linspace(-3, 3, 2048).unsqueeze(1)
    data = DataLoader(TensorDataset(x, x.sin()), batch_size=64, shuffle=True)
    saving = ModelCheckpoint(args.checkpoints, save_last=True, every_n_train_steps=args.save_every)
    trainer = lightning.Trainer(
        num_nodes=args.num_nodes,
        devices=args.devices,
        max_steps=args.max_steps,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Sine(), data, ckpt_path="last")
    if trainer.is_global_zero:
        print(f"trained {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
