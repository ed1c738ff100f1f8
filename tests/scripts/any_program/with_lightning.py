"""A Lightning script."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from pace import STEPS, finish, folder, pace
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        pace(self.global_step)
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


lightning.seed_everything(1)
x = torch.linspace(-1, 1, 512).unsqueeze(1)
trainer = lightning.Trainer(
    accelerator="cpu",
    num_nodes=2,
    devices=2,
    max_steps=STEPS,
    callbacks=[ModelCheckpoint(folder(), save_last=True, every_n_train_steps=5)],
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Line(), DataLoader(TensorDataset(x, 2 * x), batch_size=2), ckpt_path="last")
finish(trainer.global_step)
