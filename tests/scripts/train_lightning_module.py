"""Two LightningModules in hpctrain's Trainer, with arguments `FOLDER [STOP_AFTER_STEP STOP_RANK]`."""

import hashlib
import json
import os
import signal
import sys
from contextlib import suppress

import lightning
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpctrain


def stop_if_due(step: int) -> None:
    if [str(step), os.environ.get("RANK", "0")] == sys.argv[2:]:
        os.kill(os.getpid(), signal.SIGTERM)


class Sine(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        stop_if_due(self.global_step)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.error(self.net(x), y)
        self.log("val_error", self.error)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_error"}}


class Adversaries(lightning.LightningModule):
    """A generator of sines and its critic, which learns twice as often."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(1, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)
        )
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        for_generator, for_critic = self.optimizers()
        made = self.generator(x)
        with self.toggled_optimizer(for_critic):
            for_critic.zero_grad()
            for pair, sign in (((x, y), 1), ((x, made.detach()), -1)):
                # Two passes, to add to the gradients of the first.
                self.manual_backward(F.softplus(-sign * self.critic(torch.cat(pair, dim=1))).mean())
            self.clip_gradients(for_critic, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            for_critic.step()
        if batch_idx % 2 == 0:
            self.toggle_optimizer(for_generator)
            for_generator.zero_grad()
            loss = F.softplus(-self.critic(torch.cat((x, made), dim=1))).mean() + F.mse_loss(made, y)
            self.manual_backward(loss)
            for_generator.step()
            self.untoggle_optimizer(for_generator)
            self.lr_schedulers().step()
        self.log("made", made.mean())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        stop_if_due(self.global_step)

    def configure_optimizers(self):
        optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (self.generator, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 2)]


def train(module: lightning.LightningModule, run: str) -> dict:
    trainer = hpctrain.Trainer(max_epochs=4, seed=1, checkpoint_every=None, run_dir=run)
    x = torch.linspace(-3, 3, 46).unsqueeze(1)
    data = TensorDataset(x, x.sin())
    torch.manual_seed(1 + trainer.ranks.rank)
    module = module()
    # Five steps per epoch; the ranks share the six samples of the last one.
    with suppress(SystemExit):
        trainer.fit(module, DataLoader(data, batch_size=10, shuffle=True), DataLoader(data, batch_size=4))
    state = b"".join(value.detach().numpy().tobytes() for value in module.state_dict().values())
    return {"step": trainer.step, "state": hashlib.sha256(state).hexdigest(), "metrics": trainer.metrics}


if __name__ == "__main__":
    results = [train(module, f"{sys.argv[1]}/{module.__name__}") for module in (Sine, Adversaries)]
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(results))
