"""A LightningModule whose checkpoints are saved every ten steps; Lightning requeues its job by itself."""

from __future__ import annotations

import os

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from training import (
    GLOBAL_BATCH,
    NUM_STEPS,
    SAVE_EVERY,
    SEED,
    Net,
    Samples,
    adam,
    checkpoints,
    loss_of,
    record_result,
    record_step,
)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch, _batch_idx):
        return loss_of(self.net, batch)

    def on_train_batch_end(self, _outputs, batch, _batch_idx):
        record_step(self.global_step, batch[1].tolist(), self.global_rank)

    def configure_optimizers(self):
        return adam(self.parameters())


if __name__ == "__main__":
    lightning.seed_everything(SEED)
    num_nodes = int(os.environ["SLURM_NNODES"])
    save = ModelCheckpoint(checkpoints, every_n_train_steps=SAVE_EVERY, save_last=True, save_top_k=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=num_nodes,
        strategy="ddp",
        max_steps=NUM_STEPS,
        max_epochs=-1,
        callbacks=[save],
        default_root_dir=checkpoints,
        logger=False,
        enable_progress_bar=False,
    )
    module = Module()
    loader = DataLoader(Samples(), batch_size=GLOBAL_BATCH // num_nodes, shuffle=True)
    trainer.fit(module, loader, ckpt_path="last")
    if trainer.global_rank == 0:
        record_result(module.net)
