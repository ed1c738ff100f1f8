"""Train with Lightning's own Trainer and its SLURMEnvironment, which requeues the job near the time limit."""

import argparse
import os
import signal
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset
from train import disturb


class Model(lightning.LightningModule):
    """The model of `train.py`, with the inputs of each step in place of those of the loader."""

    def __init__(self, fault: str, mark: Path, pause: float) -> None:
        super().__init__()
        self.net, self.fault, self.mark, self.pause = torch.nn.Linear(4, 1), fault, mark, pause

    def training_step(self, batch, batch_idx):
        disturb(self.global_step + 1, self.fault, self.global_rank, self.trainer.world_size, self.mark)
        time.sleep(self.pause)
        generator = torch.Generator().manual_seed(1000 * (self.global_step + 1) + self.global_rank)
        inputs = torch.randn(8, 4, generator=generator)
        return (self.net(inputs) - inputs.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fault", default=os.environ.get("FAULT", ""))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        num_nodes=2,
        devices=1,
        max_steps=args.steps,
        max_epochs=-1,
        default_root_dir=args.out,
        plugins=[SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)],
        callbacks=[ModelCheckpoint(args.out, every_n_train_steps=5, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    lightning.seed_everything(0)
    model = Model(args.fault, args.out / "disturbed", args.pause)
    loader = DataLoader(TensorDataset(torch.zeros(8 * args.steps)), batch_size=4)
    trainer.fit(model, loader, ckpt_path="last")
    if trainer.is_global_zero:
        (args.out / "result").write_text(f"{model.net.weight.flatten().tolist()}\n")


if __name__ == "__main__":
    main()
